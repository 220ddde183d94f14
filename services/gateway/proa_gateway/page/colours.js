// Colours of code, by highlight.js: `highlight.min.js` is its file `es/highlight.min.js` in the npm package
// @highlightjs/cdn-assets 11.12.0, unchanged. It is loaded when there is code to be coloured.

const MAX_CHARACTERS = 50_000; // longer code stays plain: it is coloured anew with each part that arrives

// Colours the code in an element that has none yet. Code in an unknown language, or in none, stays as it is.
export async function colourCode(element) {
  const fences = [...element.querySelectorAll(".fence:not(.coloured)")].filter(languageOf);
  if (!fences.length) return;
  const { default: library } = await import("./highlight.min.js");
  for (const fence of fences) {
    fence.classList.add("coloured");
    const code = fence.querySelector("code");
    const text = code.textContent;
    if (!library.getLanguage(languageOf(fence)) || text.length > MAX_CHARACTERS) continue;
    const { value } = library.highlight(text, { language: languageOf(fence), ignoreIllegals: true });
    code.replaceChildren(...spans(value));
  }
}

function languageOf(fence) {
  return fence.querySelector(".language").textContent;
}

// The library's HTML as elements: spans with classes, and text.
function spans(html) {
  const parsed = new DOMParser().parseFromString(`<pre>\n${html}</pre>`, "text/html"); // which runs and loads nothing
  return [...parsed.querySelector("pre").childNodes].map(copy);
}

function copy(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  const span = Object.assign(document.createElement("span"), { className: node.className });
  span.append(...[...node.childNodes].map(copy));
  return span;
}

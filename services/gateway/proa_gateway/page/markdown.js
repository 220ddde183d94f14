// Markdown as a tree, and the tree as elements. HTML in the text stays text, and links go to http and https only.
// A node of the tree is a string or has a tag, properties and children; a fence has its language and text instead.

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8; // of lists and quotes in each other; what is deeper is a paragraph

// The spans are bounded, so that many openings without an end take linear time.
const INLINE = new RegExp(
  [
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /(?<!`)(?<ticks>`+)(?!`)(?<code>.{1,1000}?)(?<!`)\k<ticks>(?!`)/,
    /\*\*(?=\S)(?<strong>.{1,1000}?)(?<=\S)\*\*(?!\*)/,
    /(?<!\w)__(?=\S)(?<strongToo>.{1,1000}?)(?<=\S)__(?!\w)/,
    /\*(?![\s*])(?<em>.{1,1000}?)(?<![\s*])\*(?!\*)/,
    /(?<!\w)_(?![\s_])(?<emToo>.{1,1000}?)(?<![\s_])_(?!\w)/,
    /~~(?=\S)(?<del>.{1,1000}?)(?<=\S)~~/,
    /!?\[(?<label>[^[\]]{1,1000})\]\((?<href>https?:\/\/[^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)(?:\s+"[^"]{0,1000}")?\)/,
    /(?<url>https?:\/\/[^\s<>"'`*|]*[^\s<>"'`*|.,:;!?)\]}])/,
    /(?<newline>\n)/,
  ]
    .map((each) => each.source)
    .join("|"),
  "gs",
);

export function parse(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

// Shows a text that grows. Blocks that are as before keep their elements, and so a selection in them.
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.keys = []; // of the blocks that are shown
  }

  show(text) {
    const nodes = parse(text);
    const keys = nodes.map((node) => JSON.stringify(node));
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same += 1;
    while (this.element.children.length > same) this.element.lastElementChild.remove();
    this.element.append(...nodes.slice(same).map(toElement));
    this.keys = keys;
  }
}

// Each reader returns null, or a node and the index of the line after it.
const READERS = [readFence, readHeading, readRule, readQuote, readList, readTable, readParagraph];

function blocks(lines, depth) {
  const found = [];
  const readers = depth < MAX_DEPTH ? READERS : [readParagraph];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    for (const read of readers) {
      const result = read(lines, at, depth);
      if (!result) continue;
      found.push(result[0]);
      at = result[1];
      break;
    }
  }
  return found;
}

function readFence(lines, at) {
  const match = FENCE.exec(lines[at]);
  if (!match) return null;
  const [, indent, ticks, language] = match;
  const end = new RegExp(`^ {0,3}${ticks[0]}{${ticks.length},}\\s*$`);
  let next = at + 1;
  while (next < lines.length && !end.test(lines[next])) next += 1;
  const inside = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(at + 1, next).map((line) => line.replace(inside, ""));
  return [{ tag: "pre", language, text: text.join("\n") }, next + 1]; // one that is still open ends with the text
}

function readHeading(lines, at) {
  const match = HEADING.exec(lines[at]);
  if (!match) return null;
  return [{ tag: `h${match[1].length}`, children: inline(match[2].trim().replace(/ #+$/, "")) }, at + 1];
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? [{ tag: "hr" }, at + 1] : null;
}

function readQuote(lines, at, depth) {
  let next = at;
  while (next < lines.length && QUOTE.test(lines[next])) next += 1;
  if (next === at) return null;
  const inner = lines.slice(at, next).map((line) => line.replace(QUOTE, ""));
  return [{ tag: "blockquote", children: blocks(inner, depth + 1) }, next];
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const start = parseInt(first[2], 10); // NaN: no number, so the list is one of bullets
  const children = [];
  let next = at;
  for (let item = first; item; item = ITEM.exec(lines[next] ?? "")) {
    if (RULE.test(lines[next]) || isNaN(parseInt(item[2], 10)) !== isNaN(start)) break;
    const end = itemEnd(lines, next, item[1].length);
    const width = item[1].length + item[2].length + 1;
    const inner = lines.slice(next + 1, end).map((line) => line.slice(Math.min(indentOf(line), width)));
    children.push({ tag: "li", children: withoutParagraph(blocks([item[3], ...inner], depth + 1)) });
    next = skipBlank(lines, end);
  }
  return [isNaN(start) ? { tag: "ul", children } : { tag: "ol", start, children }, next];
}

// The line after an item: the first that is neither indented below it nor continues its last line.
function itemEnd(lines, at, indent) {
  let next = at + 1;
  while (next < lines.length) {
    const text = skipBlank(lines, next);
    const isInside = text < lines.length && indentOf(lines[text]) >= indent + 2;
    if (!isInside && (text > next || startsBlock(lines, next))) break;
    next = text + 1;
  }
  return Math.min(next, lines.length);
}

// An item's first line is shown without a paragraph's margins.
function withoutParagraph([first, ...others]) {
  return first?.tag === "p" ? [...first.children, ...others] : [first, ...others].filter(Boolean);
}

function readTable(lines, at) {
  if (!isTable(lines, at)) return null;
  const classes = cells(lines[at + 1]).map((cell) => ({ ":-:": "center", "-:": "right" })[cell.replace(/-+/, "-")] ?? "");
  const row = (line, tag) => {
    const texts = cells(line);
    return { tag: "tr", children: classes.map((className, i) => ({ tag, className, children: inline(texts[i] ?? "") })) };
  };
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|")) next += 1;
  const body = lines.slice(at + 2, next).map((line) => row(line, "td"));
  const head = { tag: "thead", children: [row(lines[at], "th")] };
  return [{ tag: "table", children: [head, { tag: "tbody", children: body }] }, next];
}

function readParagraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !startsBlock(lines, next)) next += 1;
  const text = lines.slice(at, next).map((line) => line.trim());
  return [{ tag: "p", children: inline(text.join("\n")) }, next];
}

function startsBlock(lines, at) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(lines[at])) || isTable(lines, at);
}

function isTable(lines, at) {
  const [head, delimiters] = [lines[at], lines[at + 1] ?? ""];
  return head.includes("|") && DELIMITERS.test(delimiters) && cells(head).length === cells(delimiters).length;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isBlank(line) {
  return !/\S/.test(line);
}

function skipBlank(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    push(nodes, text.slice(at, match.index), inlineNode(match.groups));
    at = match.index + match[0].length;
  }
  push(nodes, text.slice(at));
  return nodes;
}

function inlineNode(found) {
  if (found.escaped) return found.escaped;
  if (found.newline) return { tag: "br" };
  if (found.code) return { tag: "code", children: [found.code.replace(/^ (.+) $/s, "$1")] };
  if (found.href) return link(found.href, inline(found.label));
  if (found.url) return link(found.url, [found.url]);
  if (found.del) return { tag: "del", children: inline(found.del) };
  const strong = found.strong ?? found.strongToo;
  return strong ? { tag: "strong", children: inline(strong) } : { tag: "em", children: inline(found.em ?? found.emToo) };
}

function link(href, children) {
  return { tag: "a", href, target: "_blank", rel: "noopener noreferrer", children };
}

// Text beside text is one node.
function push(nodes, ...added) {
  for (const node of added) {
    if (node === "") continue;
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
    else nodes.push(node);
  }
}

function toElement(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const { tag, children = [], ...properties } = node;
  if (tag === "pre") return fenceElement(node);
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.map(toElement));
  return element;
}

function fenceElement({ language, text }) {
  const fence = document.getElementById("fence").content.firstElementChild.cloneNode(true);
  fence.querySelector(".language").textContent = language;
  fence.querySelector("code").textContent = text;
  return fence;
}

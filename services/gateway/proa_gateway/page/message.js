// One message on the page: the user's, or an answer while it streams and after.
import { colourCode } from "./colours.js";
import { imagesOf, resultOf, textOf } from "./conversation.js";
import { thumbnail } from "./images.js";
import { MarkdownView } from "./markdown.js";

export class MessageView {
  // `actions`: functions `regenerate`, `edit` with a text, and `giveResult` with a call and its result.
  constructor(list, role, actions) {
    this.list = list;
    this.role = role;
    this.actions = actions;
    this.element = copy("message");
    this.element.classList.add(role);
    this.markdown = new MarkdownView(this.part(".content"));
    this.calls = [];
    this.part(".edit").hidden = role !== "user";
    this.part(".regenerate").hidden = role === "user";
    this.part(".edit").addEventListener("click", () => this.edit());
    this.part(".regenerate").addEventListener("click", () => actions.regenerate());
    this.part(".copy").addEventListener("click", (event) => copyText(this.text, event.target));
    this.part(".content").addEventListener("click", ({ target }) => {
      if (target.matches(".copy-code")) copyText(target.closest(".fence").querySelector("code").textContent, target);
    });
    this.atEnd(() => list.append(this.element));
  }

  // `turn` has the results of calls.
  show(entry, turn) {
    const { message, footer = "", error } = entry;
    this.text = message ? textOf(message) : "";
    this.atEnd(() => {
      if (this.role === "user") this.part(".content").textContent = this.text;
      else this.showMarkdown();
      this.part(".images").replaceChildren(...(message ? imagesOf(message).map(thumbnail) : []));
      this.part(".reasoning").hidden = !message?.reasoning_content;
      this.part(".reasoning .text").textContent = message?.reasoning_content ?? "";
      for (const [index, call] of (message?.tool_calls ?? []).entries()) this.showCall(index, call, turn);
      this.part(".error").textContent = error ?? "";
      this.part(".facts").textContent = footer;
      this.part(".copy").hidden = !this.text;
    });
  }

  showMarkdown() {
    this.markdown.show(this.text);
    colourCode(this.part(".content"));
  }

  showCall(index, call, turn) {
    const shown = (this.calls[index] ??= new CallView(this.part(".calls"), call, this.actions.giveResult));
    shown.showArguments(call);
    shown.showResult(resultOf(turn, call));
  }

  // The answer is whole: its calls can have results.
  askForResults() {
    for (const call of this.calls) call.ask();
    this.calls.find((call) => call.isOpen())?.focus();
  }

  leaveOut(isLeftOut) {
    this.element.classList.toggle("left-out", isLeftOut);
  }

  // Replaces the message by an input. Enter sends it, Escape leaves it as it was.
  edit() {
    const form = copy("editor");
    const input = form.querySelector("textarea");
    const content = this.part(".content");
    const close = () => {
      form.remove();
      content.hidden = false;
    };
    if (content.hidden) return; // an editor is open
    input.value = this.text;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.edit(input.value.trim());
    });
    form.querySelector(".cancel").addEventListener("click", close);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else submitOnEnter(event);
    });
    content.hidden = true;
    content.after(form);
    input.focus();
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  // Changes the page, and stays at its end unless the user has scrolled up.
  atEnd(change) {
    const { list } = this;
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    change();
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }
}

// A call of a tool, whose result the user gives.
class CallView {
  constructor(list, call, giveResult) {
    this.element = copy("call");
    this.input = this.element.querySelector(".result");
    this.element.querySelector(".name").textContent = call.function.name;
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isOpen()) giveResult(this.call, this.input.value);
    });
    list.append(this.element);
  }

  showArguments(call) {
    this.call = call;
    this.element.querySelector(".arguments").textContent = call.function.arguments;
  }

  showResult(result) {
    if (result === undefined) return;
    this.input.hidden = false;
    this.input.value = result;
    this.input.disabled = true;
  }

  ask() {
    this.input.hidden = false;
  }

  isOpen() {
    return !this.input.hidden && !this.input.disabled;
  }

  focus() {
    this.input.focus();
  }
}

export function submitOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

function copy(template) {
  return document.getElementById(template).content.firstElementChild.cloneNode(true);
}

async function copyText(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copySelected(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1000);
}

// Over http, browsers give the clipboard only to pages of this machine.
function copySelected(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

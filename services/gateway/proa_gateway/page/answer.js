// One message on the page, filled in as its deltas arrive.
import { thumbnail } from "./images.js";

export class Answer {
  constructor(list, role) {
    this.element = copy("message");
    this.element.classList.add(role);
    list.append(this.element);
    this.list = list;
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.ids = [];
    this.tokens = 0;
    this.first = null; // the first read of the stream that had tokens: when, and how many
    this.lastReadAt = null;
  }

  begin() {
    this.startedAt = performance.now();
    this.part("footer").textContent = "…";
  }

  addDelta(delta, finishReason) {
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) this.addReasoning(reasoning);
    if (delta.content) this.addContent(delta.content);
    for (const part of delta.tool_calls ?? []) this.addCall(part);
    if (finishReason) this.finishReason = finishReason;
  }

  addContent(text) {
    this.text += text;
    this.show(() => this.part(".content").append(text));
  }

  addImages(urls) {
    this.show(() => this.part(".images").append(...urls.map(thumbnail)));
  }

  addReasoning(text) {
    this.reasoning += text;
    this.part(".reasoning").hidden = false;
    this.show(() => this.part(".reasoning .text").append(text));
  }

  addCall(part) {
    const call = (this.calls[part.index] ??= new Call(this.part(".calls"), part.id, part.function.name));
    this.show(() => call.addArguments(part.function?.arguments ?? ""));
  }

  showIds(requestId, traceId) {
    this.ids = [requestId && `request ${requestId}`, traceId && `trace ${traceId}`].filter(Boolean);
  }

  // `usage` counts all tokens up to this event. `readAt` is the same for all events of one read.
  addUsage(usage, readAt) {
    this.tokens = usage.completion_tokens;
    if (!this.tokens) return;
    this.first ??= { readAt };
    if (this.first.readAt === readAt) this.first.tokens = this.tokens;
    this.lastReadAt = readAt;
  }

  // Show what is known of the answer, and `facts` before it.
  end(...facts) {
    if (this.first) {
      facts.push(`${this.tokens} tokens`, `first after ${Math.round(this.first.readAt - this.startedAt)} ms`);
      if (this.tokens > 1) facts.push(`${this.perSecond().toFixed(1)} tokens/s`);
    }
    if (this.finishReason === "length") facts.push("cut off at the maximum of tokens");
    this.show(() => (this.part("footer").textContent = [...facts, ...this.ids].join(" · ")));
  }

  fail(message) {
    const line = document.createElement("div");
    line.className = "error";
    line.textContent = message;
    this.show(() => this.part("footer").replaceChildren(line, this.ids.join(" · ")));
  }

  // The message is no longer part of the conversation.
  leaveOut() {
    this.element.classList.add("left-out");
  }

  // Tokens a second, from the first token. If text was held back, many tokens come with the first read: they were
  // generated before it, at times that are unknown, so the time since the question counts.
  perSecond() {
    const inTime = this.first.tokens <= 1 + this.tokens / 8;
    const [tokens, since] = inTime ? [this.tokens - this.first.tokens, this.first.readAt] : [this.tokens, this.startedAt];
    return tokens / ((this.lastReadAt - since) / 1000);
  }

  // The message in the API's form, for the next request.
  message() {
    const message = { role: "assistant", content: this.text || (this.calls.length ? null : "") };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) message.tool_calls = this.calls.map((call) => call.toJson());
    return message;
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  // Change the page, and stay at its end unless the user has scrolled up.
  show(change) {
    const { list } = this;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    change();
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
}

class Call {
  constructor(list, id, name) {
    this.id = id;
    this.name = name;
    this.text = "";
    this.element = copy("call");
    this.element.querySelector(".name").textContent = name;
    this.element.querySelector(".result").hidden = true;
    this.element.addEventListener("submit", (event) => event.preventDefault());
    list.append(this.element);
  }

  addArguments(text) {
    this.text += text;
    this.element.querySelector(".arguments").textContent = this.text;
  }

  // Ask the user for the call's result. `onResult` is called with it once.
  ask(onResult) {
    const input = this.element.querySelector(".result");
    input.hidden = false;
    input.focus();
    this.element.addEventListener("submit", () => {
      if (input.disabled) return;
      input.disabled = true;
      onResult(input.value);
    });
  }

  toJson() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.text } };
  }
}

function copy(template) {
  return document.getElementById(template).content.firstElementChild.cloneNode(true);
}

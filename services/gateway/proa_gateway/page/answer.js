// An answer as its deltas arrive: its message in the API's form, and the figures of its stream.

export class Answer {
  constructor(startedAt) {
    this.startedAt = startedAt;
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.ids = [];
    this.usage = null;
    this.first = null; // the first read of the stream that had tokens: when, and how many
    this.lastReadAt = null;
  }

  addDelta(delta, finishReason) {
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    this.text += delta.content ?? "";
    for (const { index, id, function: called } of delta.tool_calls ?? []) {
      const call = (this.calls[index] ??= { id, type: "function", function: { name: called.name, arguments: "" } });
      call.function.arguments += called?.arguments ?? "";
    }
    if (finishReason) this.finishReason = finishReason;
  }

  addIds(requestId, traceId) {
    this.ids = [requestId && `request ${requestId}`, traceId && `trace ${traceId}`].filter(Boolean);
  }

  // `usage` counts all tokens up to this event. `readAt` is the same for all events of one read.
  addUsage(usage, readAt) {
    this.usage = usage;
    if (!usage.completion_tokens) return;
    this.first ??= { readAt };
    if (this.first.readAt === readAt) this.first.tokens = usage.completion_tokens;
    this.lastReadAt = readAt;
  }

  message(calls = this.calls) {
    const message = { role: "assistant", content: this.text || (calls.length ? null : "") };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (calls.length) message.tool_calls = calls;
    return message;
  }

  // The whole answer, as the conversation keeps it.
  entry() {
    return { message: this.message(), usage: this.usage, footer: this.footer() };
  }

  // An answer that was stopped or failed. It has a message if there is text; its calls may be incomplete.
  brokenEntry(fact, error) {
    return { message: this.text ? this.message([]) : null, usage: this.usage, footer: this.footer(fact), error };
  }

  // What is known of the answer, with `fact` before it.
  footer(fact) {
    return [fact, ...this.figures(), ...this.ids].filter(Boolean).join(" · ");
  }

  figures() {
    if (!this.first) return [];
    const { prompt_tokens: prompt, prompt_tokens_details: details, completion_tokens: tokens } = this.usage;
    const cached = details?.cached_tokens ? ` (${details.cached_tokens} cached)` : "";
    const facts = prompt ? [`${prompt} prompt tokens${cached}`] : [];
    facts.push(`${tokens} tokens`, `first after ${Math.round(this.first.readAt - this.startedAt)} ms`);
    if (tokens > 1) facts.push(`${this.perSecond().toFixed(1)} tokens/s`);
    if (this.finishReason === "length") facts.push("cut off at the maximum of tokens");
    return facts;
  }

  // Tokens a second, from the first token. If text was held back, many tokens come with the first read: they were
  // generated before it, at times that are unknown, so the time since the question counts.
  perSecond() {
    const total = this.usage.completion_tokens;
    const inTime = this.first.tokens <= 1 + total / 8;
    const [tokens, since] = inTime ? [total - this.first.tokens, this.first.readAt] : [total, this.startedAt];
    return tokens / ((this.lastReadAt - since) / 1000);
  }
}

// The conversation as data: turns of entries, which are stored, sent and shown. A turn begins with the user's message;
// calls of tools have their results and another answer in the same turn. An entry has a message in the API's form, and
// an answer's entry also `usage`, `footer` and `error`; the message is null if the model gave none.

export class Conversation {
  constructor(turns = []) {
    this.turns = turns;
  }

  ask(message) {
    this.turns.push([{ message }]);
  }

  add(entry) {
    this.turns.at(-1).push(entry);
  }

  // Removes the last answer, so that the model can give another.
  dropAnswer() {
    const turn = this.turns.at(-1);
    while (!["user", "tool"].includes(turn.at(-1).message?.role)) turn.pop();
  }

  // Removes a turn and all that follow.
  dropFrom(turn) {
    this.turns.length = this.turns.indexOf(turn);
  }

  // The messages of the next request. A turn without an answer is in none but its own request: what the gateway
  // refused in it would be refused in every later one.
  messages() {
    const sent = this.turns.filter((turn) => turn === this.turns.at(-1) || isAnswered(turn));
    return sent.flatMap((turn) => turn.map((entry) => entry.message));
  }

  // Calls of the last answer whose results the user has to give.
  openCalls() {
    const turn = this.turns.at(-1) ?? [];
    const answer = turn.findLast((entry) => entry.message?.role !== "tool");
    return (answer?.message?.tool_calls ?? []).filter((call) => resultOf(turn, call) === undefined);
  }

  usage() {
    return this.turns.flat().findLast((entry) => entry.usage)?.usage;
  }
}

export function isAnswered(turn) {
  return turn.at(-1).message !== null && turn.at(-1).message.role !== "user";
}

// The user's result of a call, or undefined.
export function resultOf(turn, call) {
  return turn.find((entry) => entry.message?.tool_call_id === call.id)?.message.content;
}

export function userMessage(text, urls) {
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = urls.length ? [...images, ...(text ? [{ type: "text", text }] : [])] : text;
  return { role: "user", content };
}

export function textOf({ content }) {
  if (!Array.isArray(content)) return content ?? "";
  return content.flatMap((part) => part.text ?? []).join("\n");
}

export function imagesOf({ content }) {
  return Array.isArray(content) ? content.flatMap((part) => part.image_url?.url ?? []) : [];
}

// What a list of chats calls a chat: the beginning of its first message.
export function titleOf(turns) {
  const message = turns[0]?.[0].message;
  const text = message ? textOf(message).trim().split("\n", 1)[0].slice(0, 80) : "";
  return text || "Image";
}

// The turns with a note in place of each image.
export function withoutImages(turns) {
  const note = { type: "text", text: "(image: not kept)" };
  const strip = (content) =>
    Array.isArray(content) ? content.map((part) => (part.image_url ? note : part)) : content;
  return turns.map((turn) =>
    turn.map((entry) =>
      entry.message ? { ...entry, message: { ...entry.message, content: strip(entry.message.content) } } : entry,
    ),
  );
}

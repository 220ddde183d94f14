// The gateway's API: its models, one streamed chat completion, and the text of a recording.

export async function listModels(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  await check(response);
  return (await response.json()).data;
}

// Sends the chat and adds to the answer as its parts arrive, each time with a call of `onAdded`. Throws an Error with a
// sentence for the user, and with the gateway's `status` and the request's field at fault as `param`.
export async function streamChat(body, key, signal, answer, onAdded) {
  const usage = { include_usage: true, continuous_usage_stats: true };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: usage }),
    signal,
  });
  await check(response);
  answer.addIds(response.headers.get("x-request-id"), response.headers.get("x-trace-id"));
  for await (const [event, readAt] of events(response.body)) {
    if (event.error) throw failure(event.error, response.status);
    const choice = event.choices[0];
    if (choice) answer.addDelta(choice.delta, choice.finish_reason);
    if (event.usage) answer.addUsage(event.usage, readAt);
    onAdded();
  }
}

// The text of a recording, by a speech model. Throws as `streamChat` does.
export async function transcribe(recording, model, key) {
  const form = new FormData();
  form.append("model", model);
  form.append("file", recording, "recording");
  const response = await fetch("v1/audio/transcriptions", { method: "POST", headers: headers(key), body: form });
  await check(response);
  return (await response.json()).text;
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function check(response) {
  if (response.ok) return;
  const body = await response.json().catch(() => null);
  throw failure(body?.error ?? { message: `${response.status} ${response.statusText}` }, response.status);
}

function failure({ message, param }, status) {
  return Object.assign(new Error(message), { status, param });
}

// The JSON values of a stream of server-sent events, up to [DONE], each with the time at which it was read.
async function* events(stream) {
  let text = "";
  for await (const chunk of chunks(stream.pipeThrough(new TextDecoderStream()))) {
    const readAt = performance.now();
    const parts = (text + chunk).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // a comment, while no token comes
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield [JSON.parse(data), readAt];
    }
  }
}

// Not every browser iterates a stream itself.
async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {}); // the stream has failed or was aborted
  }
}

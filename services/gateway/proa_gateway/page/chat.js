// The page's behaviour: it keeps the conversation, sends it, and shows the answer as it streams.
import { Answer } from "./answer.js";
import { listModels, streamChat } from "./api.js";

const find = (id) => document.getElementById(id);
const messages = []; // the conversation in the API's form
let running = null; // AbortController of the answer that is being generated
let numOpenCalls = 0; // of the last answer, whose results the user has to give

async function start() {
  find("composer").addEventListener("submit", onSubmit);
  find("prompt").addEventListener("keydown", onKey);
  find("stop").addEventListener("click", () => running?.abort());
  find("new-chat").addEventListener("click", reset);
  find("settings").addEventListener("submit", (event) => event.preventDefault());
  find("api-key").addEventListener("change", showModels);
  await showModels();
}

async function showModels() {
  try {
    const names = await listModels(find("api-key").value);
    find("model").replaceChildren(...names.map((name) => new Option(name, name)));
  } catch (error) {
    find("model").replaceChildren(new Option(error.message, ""));
  }
}

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("composer").requestSubmit();
  }
}

function onSubmit(event) {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!text || running || numOpenCalls) return;
  find("prompt").value = "";
  messages.push({ role: "user", content: text });
  const question = new Answer(find("messages"), "user");
  question.addContent(text);
  respond();
}

async function respond() {
  const answer = new Answer(find("messages"), "assistant");
  running = new AbortController();
  showRunning(true);
  try {
    await streamChat(requestBody(), find("api-key").value, running.signal, answer);
    messages.push(answer.message());
    askForResults(answer);
  } catch (error) {
    if (error.name !== "AbortError") answer.fail(error.message);
    answer.calls = []; // they may be incomplete
    if (answer.text) messages.push(answer.message());
  } finally {
    running = null;
    showRunning(false);
  }
}

function requestBody() {
  const system = find("system").value.trim();
  const body = { model: find("model").value, messages: [...messages] };
  if (system) body.messages.unshift({ role: "system", content: system });
  if (find("tools").value.trim()) body.tools = JSON.parse(find("tools").value);
  if (find("temperature").value) body.temperature = Number(find("temperature").value);
  if (find("max-tokens").value) body.max_completion_tokens = Number(find("max-tokens").value);
  return body;
}

// Each call of the answer gets an input; when all have a result, the conversation goes on.
function askForResults(answer) {
  numOpenCalls = answer.calls.length;
  for (const call of answer.calls) {
    call.ask((result) => {
      messages.push({ role: "tool", tool_call_id: call.id, content: result });
      numOpenCalls -= 1;
      if (numOpenCalls === 0) respond();
    });
  }
}

function showRunning(isRunning) {
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
}

function reset() {
  running?.abort();
  messages.length = 0;
  numOpenCalls = 0;
  find("messages").replaceChildren();
  find("prompt").focus();
}

start();

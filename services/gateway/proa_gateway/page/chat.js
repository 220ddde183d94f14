// The page's behaviour: it keeps the conversation, sends it, and shows the answer as it streams.
import { Answer } from "./answer.js";
import { listModels, streamChat } from "./api.js";
import { Images } from "./images.js";

const find = (id) => document.getElementById(id);
const RETRY_MS = 2000; // between lists of models, until there is one
let turns = []; // the conversation: each turn has messages in the API's form, and the answers that show them
const images = new Images(find("images"));
let imageModels = new Set(); // names of the models that read images
let running = null; // AbortController of the answer that is being generated
let numOpenCalls = 0; // of the last answer, whose results the user has to give
let retry = null; // timer of the next list of models

async function start() {
  find("composer").addEventListener("submit", onSubmit);
  find("prompt").addEventListener("keydown", onKey);
  find("stop").addEventListener("click", () => running?.abort());
  find("new-chat").addEventListener("click", reset);
  find("settings").addEventListener("submit", (event) => event.preventDefault());
  find("api-key").addEventListener("change", showModels);
  find("model").addEventListener("change", showAttach);
  find("attach").addEventListener("click", () => find("files").click());
  find("files").addEventListener("change", onFiles);
  find("prompt").addEventListener("paste", onPaste);
  await showModels();
}

// Lists the models, again and again until an engine serves one.
async function showModels() {
  clearTimeout(retry);
  try {
    const models = await listModels(find("api-key").value);
    imageModels = new Set(models.filter((model) => model.input_modalities?.includes("image")).map((model) => model.id));
    const options = models.map(({ id }) => new Option(id, id));
    find("model").replaceChildren(...(options.length ? options : [new Option("waiting for a model …", "")]));
    if (options.length) notify("");
  } catch (error) {
    find("model").replaceChildren(new Option(error.message, ""));
    if (error.status === 401) return; // until there is another key
  } finally {
    showAttach();
  }
  if (!find("model").value) retry = setTimeout(showModels, RETRY_MS);
}

function showAttach() {
  find("attach").hidden = !imageModels.has(find("model").value);
  if (find("attach").hidden) images.take();
}

async function onFiles() {
  await images.add(find("files").files);
  find("files").value = ""; // so that the same file can be chosen again
  find("prompt").focus();
}

function onPaste(event) {
  if (!find("attach").hidden) images.add(event.clipboardData.files);
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
  if (!(text || images.urls.length)) return;
  notify(obstacle());
  if (obstacle()) return;
  find("prompt").value = "";
  const urls = images.take();
  const question = new Answer(find("messages"), "user");
  question.addImages(urls);
  question.addContent(text);
  const turn = { messages: [{ role: "user", content: urls.length ? parts(urls, text) : text }], shown: [question] };
  turns.push(turn);
  respond(turn);
}

// Why no message can be sent now. Empty if one can.
function obstacle() {
  if (running) return "The model is still answering: wait, or stop it.";
  if (numOpenCalls) return "The model waits for the result of its call: enter it above, or begin a new chat.";
  if (!find("model").value) return `No model can be used: ${find("model").selectedOptions[0].text}`;
  return "";
}

function notify(text) {
  find("notice").textContent = text;
}

function parts(urls, text) {
  const shown = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...shown, { type: "text", text }] : shown;
}

// Generates the turn's next message. If there is none, the turn is left out of the conversation: it would be in every
// later request, where it may be what the gateway refuses.
async function respond(turn) {
  const answer = new Answer(find("messages"), "assistant");
  turn.shown.push(answer);
  running = new AbortController();
  showRunning(true);
  try {
    await streamChat(requestBody(), find("api-key").value, running.signal, answer);
    turn.messages.push(answer.message());
    askForResults(turn, answer);
  } catch (error) {
    if (error.name === "AbortError") answer.end("stopped");
    else answer.fail(error.message);
    answer.calls = []; // they may be incomplete
    if (answer.text) turn.messages.push(answer.message());
    else leaveOut(turn);
  } finally {
    running = null;
    showRunning(false);
    notify("");
  }
}

function leaveOut(turn) {
  turns = turns.filter((other) => other !== turn);
  for (const message of turn.shown) message.leaveOut();
}

function requestBody() {
  const system = find("system").value.trim();
  const body = { model: find("model").value, messages: turns.flatMap((turn) => turn.messages) };
  if (system) body.messages.unshift({ role: "system", content: system });
  if (find("tools").value.trim()) body.tools = JSON.parse(find("tools").value);
  if (find("temperature").value) body.temperature = Number(find("temperature").value);
  if (find("max-tokens").value) body.max_completion_tokens = Number(find("max-tokens").value);
  return body;
}

// Each call of the answer gets an input; when all have a result, the conversation goes on.
function askForResults(turn, answer) {
  numOpenCalls = answer.calls.length;
  for (const call of answer.calls) {
    call.ask((result) => {
      turn.messages.push({ role: "tool", tool_call_id: call.id, content: result });
      numOpenCalls -= 1;
      notify("");
      if (numOpenCalls === 0) respond(turn);
    });
  }
}

function showRunning(isRunning) {
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
}

function reset() {
  running?.abort();
  turns = [];
  numOpenCalls = 0;
  notify("");
  images.take();
  find("messages").replaceChildren();
  find("prompt").focus();
}

start();

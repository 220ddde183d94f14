// The page's behaviour: it keeps the conversation, sends it, and shows the answer as it streams.
import { Answer } from "./answer.js";
import { listModels, streamChat } from "./api.js";
import { Images } from "./images.js";

const find = (id) => document.getElementById(id);
const messages = []; // the conversation in the API's form
const images = new Images(find("images"));
let imageModels = new Set(); // names of the models that read images
let running = null; // AbortController of the answer that is being generated
let numOpenCalls = 0; // of the last answer, whose results the user has to give

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

async function showModels() {
  try {
    const models = await listModels(find("api-key").value);
    imageModels = new Set(models.filter((model) => model.input_modalities?.includes("image")).map((model) => model.id));
    find("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  } catch (error) {
    find("model").replaceChildren(new Option(error.message, ""));
  }
  showAttach();
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
  if (!(text || images.urls.length) || running || numOpenCalls) return;
  find("prompt").value = "";
  const urls = images.take();
  messages.push({ role: "user", content: urls.length ? parts(urls, text) : text });
  const question = new Answer(find("messages"), "user");
  question.addImages(urls);
  question.addContent(text);
  respond();
}

function parts(urls, text) {
  const shown = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...shown, { type: "text", text }] : shown;
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
  images.take();
  find("messages").replaceChildren();
  find("prompt").focus();
}

start();

// The page's behaviour: sends the conversation, shows the answer as it streams, and keeps both.
import { Answer } from "./answer.js";
import { listModels, streamChat, transcribe } from "./api.js";
import { Chats } from "./chats.js";
import { Conversation, imagesOf, isAnswered, userMessage } from "./conversation.js";
import { Dictation } from "./dictation.js";
import { Images, drawing } from "./images.js";
import { MessageView, submitOnEnter } from "./message.js";
import { Settings } from "./settings.js";

const RETRY_MS = 2000; // between lists of models, until there is one
const EASY = ["What is the capital of France?", "Tell me a story.", "What is 17 + 25?"]; // for the built-in model too
const RICH = [
  "Explain in three sentences why the sky is blue.",
  "Compare TCP and UDP in a table.",
  "Write a Python function that finds the primes up to n.",
];
const PICTURE = "What is in this picture?";
const LEFT = "stopped by a reload";
const SMALL_CONTEXT = 4096; // tokens: a model with no more gets the easy examples

const find = (id) => document.getElementById(id);
const chats = new Chats(find("chats"), { open: openChat, remove: removeChat });
const conversation = new Conversation(chats.choose(chats.id));
const settings = new Settings(find("settings-panel"), { thinking: find("thinking") });
const images = new Images(find("images"));
const dictation = new Dictation(find("dictate"), { onRecorded, onFailed: notify });
let views = []; // of the conversation's entries but results of calls, each with its turn
let models = new Map(); // the gateway's models that chat, by name
let speechModel = null; // name of the first that transcribes
let running = null; // what is being generated: its answer, turn, view and AbortController
let isLeaving = false; // the page is about to be left, which ends its connections
let retry = null; // timer of the next list of models

async function start() {
  find("composer").addEventListener("submit", onSubmit);
  find("prompt").addEventListener("keydown", submitOnEnter);
  find("prompt").addEventListener("paste", (event) => attach(event, event.clipboardData.files));
  find("stop").addEventListener("click", () => endAnswer("stopped"));
  find("new-chat").addEventListener("click", () => openChat());
  find("show-chats").addEventListener("click", () => showList(!document.body.classList.contains("lists-chats")));
  find("model").addEventListener("change", onModel);
  find("attach").addEventListener("click", () => find("files").click());
  find("files").addEventListener("change", onFiles);
  settings.controls.api_key.addEventListener("change", showModels);
  document.addEventListener("keydown", onKey);
  document.addEventListener("dragover", (event) => event.preventDefault()); // without it, a drop opens the file
  document.addEventListener("drop", (event) => attach(event, event.dataTransfer.files));
  window.addEventListener("beforeunload", () => (isLeaving = true));
  window.addEventListener("pagehide", () => endAnswer(LEFT));
  showConversation();
  await showModels();
}

// Lists the models, again and again until an engine serves one.
async function showModels() {
  const select = find("model");
  const wanted = select.value || settings.kept.model;
  clearTimeout(retry);
  try {
    const listed = await listModels(settings.key);
    const chatting = listed.filter((model) => model.task !== "transcribe");
    models = new Map(chatting.map((model) => [model.id, model]));
    speechModel = listed.find((model) => model.task === "transcribe")?.id ?? null;
    const options = [...models.keys()].map((id) => new Option(id, id));
    const missing = listed.length ? "no model that chats" : "waiting for a model …";
    select.replaceChildren(...(options.length ? options : [new Option(missing, "")]));
    if (models.has(wanted)) select.value = wanted;
    if (options.length) notify("");
  } catch (error) {
    models = new Map();
    speechModel = null;
    select.replaceChildren(new Option(error.message, ""));
    if (error.status === 401) return; // until there is another key
  } finally {
    showModel();
  }
  if (!select.value) retry = setTimeout(showModels, RETRY_MS);
}

function onKey(event) {
  if (event.key === "Escape" && !event.isComposing) endAnswer("stopped");
}

function onModel() {
  settings.keep({ model: find("model").value });
  showModel();
}

// Shows what the chosen model can do.
function showModel() {
  const readsImages = hasImages();
  find("attach").hidden = !readsImages;
  find("dictate").hidden = !(speechModel && dictation.isPossible);
  if (!readsImages) images.take();
  find("thinking-label").hidden = !model()?.thinking_switch;
  settings.showDefaults(model(), find("defaults"));
  showContext();
  showExamples();
}

function model() {
  return models.get(find("model").value);
}

function hasImages() {
  return Boolean(model()?.input_modalities?.includes("image"));
}

function showExamples() {
  const texts = (model()?.max_model_len ?? 0) > SMALL_CONTEXT ? RICH : EASY;
  const shown = hasImages() ? [...texts.slice(0, 2), PICTURE] : texts;
  const buttons = shown.map((text) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.addEventListener("click", () => send(text, text === PICTURE ? [drawing()] : []));
    return button;
  });
  find("examples").replaceChildren(...(model() ? buttons : []));
}

// The tokens that the conversation had at its last answer.
function showContext() {
  const usage = conversation.usage();
  const size = model()?.max_model_len;
  const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  const text = `${used.toLocaleString("en")} of ${size?.toLocaleString("en")} tokens of context`;
  find("context").textContent = used && size ? text : "";
}

async function onFiles() {
  await images.add([...find("files").files]);
  find("files").value = ""; // so that the same file can be chosen again
  find("prompt").focus();
}

// Adds what was said to the message.
async function onRecorded(recording) {
  notify("Transcribing …");
  try {
    const text = await transcribe(recording, speechModel, settings.key);
    const before = find("prompt").value;
    find("prompt").value = before && text ? `${before.trimEnd()} ${text}` : before + text;
    notify(text ? "" : "Nothing was heard.");
  } catch (error) {
    notify(settings.describe(error));
  }
  find("prompt").focus();
}

function attach(event, list) {
  const files = [...list]; // the list is empty once the event is over
  if (!files.length) return;
  event.preventDefault();
  const other = files.find((file) => !file.type.startsWith("image/"));
  if (!hasImages()) notify(`${find("model").value || "The model"} reads no images.`);
  else notify(other ? `${other.name} is not attached: it is no image.` : "");
  if (hasImages()) images.add(files);
  find("prompt").focus();
}

function onSubmit(event) {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!(text || images.urls.length) || !send(text, images.urls)) return;
  find("prompt").value = "";
  images.take();
}

// Begins a turn. Returns whether that is possible; if not, the user sees why.
function send(text, urls) {
  notify(obstacle());
  if (obstacle()) return false;
  conversation.ask(userMessage(text, urls));
  addView(conversation.turns.at(-1), conversation.turns.at(-1)[0]);
  respond();
  return true;
}

// Why no message can be sent now. Empty if one can.
function obstacle() {
  const isOpen = conversation.openCalls().length > 0;
  return isOpen ? "The model waits for the result of its call: enter it above, or begin a new chat." : requestObstacle();
}

// Why no request can be made now, of whatever conversation.
function requestObstacle() {
  if (running) return "The model is still answering: wait, or stop it.";
  if (!model()) return `No model can be used: ${find("model").selectedOptions[0].text}`;
  return settings.fault();
}

function notify(text) {
  find("notice").textContent = text;
}

// Generates the last turn's next message.
async function respond() {
  const turn = conversation.turns.at(-1);
  const answer = new Answer(performance.now());
  const view = addView(turn, { message: answer.message(), footer: "…" });
  const own = { answer, turn, view, controller: new AbortController() };
  let frame = null;
  const show = () => {
    frame = null;
    if (running === own) view.show({ message: answer.message(), footer: "…" }, turn);
  };
  running = own;
  isLeaving = false;
  showRunning(true);
  showLeftOut(turn, false);
  save();
  let entry;
  try {
    const { signal } = own.controller;
    await streamChat(requestBody(), settings.key, signal, answer, () => (frame ??= requestAnimationFrame(show)));
    entry = answer.entry();
  } catch (error) {
    entry = isLeaving ? answer.brokenEntry(LEFT, "") : answer.brokenEntry("", settings.describe(error));
  }
  if (running === own) finish(entry); // else it was ended
}

// Ends the answer that is being generated, if there is one. What has come of it is kept, with the reason `fact`.
function endAnswer(fact) {
  if (!running) return;
  running.controller.abort();
  finish(running.answer.brokenEntry(fact, ""));
}

function finish(entry) {
  const { turn, view } = running;
  running = null;
  showRunning(false);
  conversation.add(entry);
  view.show(entry, turn);
  showLeftOut(turn, !isAnswered(turn));
  if (conversation.openCalls().length) view.askForResults();
  showContext();
  notify("");
  save();
}

function requestBody() {
  const body = { model: find("model").value, ...settings.fields(conversation.messages()) };
  const { thinking_switch: name } = model();
  const thinking = find("thinking").value;
  if (name && thinking) body.chat_template_kwargs = { [name]: thinking === "on" };
  return body;
}

// When all calls of the answer have a result, the conversation goes on.
function giveResult(call, result) {
  const turn = conversation.turns.at(-1);
  conversation.add({ message: { role: "tool", tool_call_id: call.id, content: result } });
  const answer = turn.findLast((entry) => entry.message?.tool_calls);
  views.at(-1).view.show(answer, turn);
  notify("");
  if (conversation.openCalls().length) save();
  else respond();
}

function regenerate() {
  notify(requestObstacle());
  if (requestObstacle()) return;
  conversation.dropAnswer();
  showConversation();
  respond();
}

// Asks again with another text, in place of a turn and of all that follow.
function edit(turn, text) {
  const urls = imagesOf(turn[0].message);
  notify(requestObstacle());
  if (requestObstacle() || !(text || urls.length)) return;
  conversation.dropFrom(turn);
  showConversation();
  send(text, urls);
}

function addView(turn, entry) {
  const role = entry.message?.role === "user" ? "user" : "assistant";
  const actions = { regenerate, giveResult, edit: (text) => edit(turn, text) };
  const view = new MessageView(find("messages"), role, actions);
  view.show(entry, turn);
  views.push({ turn, view });
  find("welcome").hidden = true;
  return view;
}

// Shows the whole conversation anew.
function showConversation() {
  views = [];
  find("messages").replaceChildren();
  find("welcome").hidden = conversation.turns.length > 0;
  for (const turn of conversation.turns) {
    for (const entry of turn.filter(({ message }) => message?.role !== "tool")) {
      addView(turn, entry);
    }
    showLeftOut(turn, !isAnswered(turn));
  }
  if (conversation.openCalls().length) views.at(-1).view.askForResults();
  showContext();
}

function showLeftOut(turn, isLeftOut) {
  for (const shown of views) if (shown.turn === turn) shown.view.leaveOut(isLeftOut);
}

function showRunning(isRunning) {
  document.body.classList.toggle("running", isRunning);
  find("messages").setAttribute("aria-busy", String(isRunning));
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
}

function save() {
  const fault = chats.save(conversation.turns);
  if (fault) notify(fault);
}

// Shows another chat; without an id, a new one.
function openChat(id) {
  endAnswer("stopped");
  conversation.turns = chats.choose(id);
  notify("");
  images.take();
  showList(false);
  showConversation();
  find("prompt").focus();
}

function removeChat(id, title) {
  if (!confirm(`Delete the chat “${title}”?`)) return;
  if (id === chats.id) openChat();
  chats.remove(id);
}

// On a narrow screen the list of chats is above the page.
function showList(isShown) {
  document.body.classList.toggle("lists-chats", isShown);
  find("show-chats").setAttribute("aria-expanded", String(isShown));
}

start();

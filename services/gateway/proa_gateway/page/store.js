// What survives a reload, in this browser only: chats and settings. The API key, and which chat is shown, are kept until
// the tab is closed.
import { titleOf, withoutImages } from "./conversation.js";

const place = location.pathname; // gateways may share an origin
const CHAT = `proa.chat ${place} `; // before a chat's id
const SETTINGS = `proa.settings ${place}`;
const KEY = `proa.key ${place}`;
const SHOWN = `proa.shown ${place}`;
const MAX_CHARACTERS = 2_000_000; // of a chat with its images; browsers keep about 5 million for an origin

// The chats without their turns, the last changed one first.
export function listChats() {
  const ids = keys().flatMap((key) => (key.startsWith(CHAT) ? [key.slice(CHAT.length)] : []));
  const chats = ids.flatMap((id) => {
    const { title, changed } = read("localStorage", CHAT + id) ?? {};
    return title === undefined ? [] : [{ id, title, changed }];
  });
  return chats.sort((one, other) => other.changed - one.changed);
}

// The turns of a chat.
export function loadChat(id) {
  const turns = read("localStorage", CHAT + id)?.turns;
  return Array.isArray(turns) ? turns : [];
}

// Keeps a chat, without its images if it is too long. Returns a sentence for the user if something is not kept.
export function saveChat(id, turns) {
  const chat = (kept) => ({ title: titleOf(kept), changed: Date.now(), turns: kept });
  if (write("localStorage", CHAT + id, chat(turns))) return "";
  if (write("localStorage", CHAT + id, chat(withoutImages(turns))))
    return "The images will not survive a reload: they are too large.";
  deleteChat(id); // what was kept of it is not this chat
  return "The chat will not survive a reload: it is too long, or the browser has no room; deleting old chats makes some.";
}

export function deleteChat(id) {
  try {
    localStorage.removeItem(CHAT + id);
  } catch {
    // the browser keeps nothing
  }
}

// The id of the chat that this tab has shown, or null.
export function loadShown() {
  return read("sessionStorage", SHOWN);
}

export function saveShown(id) {
  write("sessionStorage", SHOWN, id);
}

// Calls back when another tab has changed what is kept.
export function onOthersChange(callback) {
  window.addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(CHAT)) callback();
  });
}

export function loadSettings() {
  return { ...read("localStorage", SETTINGS), api_key: read("sessionStorage", KEY) ?? "" };
}

export function saveSettings({ api_key: key, ...settings }) {
  write("localStorage", SETTINGS, settings);
  write("sessionStorage", KEY, key);
}

function keys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return []; // the browser keeps nothing
  }
}

function read(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(name));
  } catch {
    return null; // not written by this page, or the browser keeps nothing
  }
}

function write(storage, name, value) {
  const text = JSON.stringify(value);
  if (text.length > MAX_CHARACTERS) return false;
  try {
    window[storage].setItem(name, text);
    return true;
  } catch {
    return false; // the origin's share is used up, or the browser keeps nothing
  }
}

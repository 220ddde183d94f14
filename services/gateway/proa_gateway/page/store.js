// What survives a reload, in this browser only: the chat and the settings. The API key is kept until the tab is closed.
import { withoutImages } from "./conversation.js";

const place = location.pathname; // gateways may share an origin
const CHAT = `proa.chat ${place}`;
const SETTINGS = `proa.settings ${place}`;
const KEY = `proa.key ${place}`;
const MAX_CHARACTERS = 2_000_000; // of a chat with its images; browsers keep about 5 million for an origin

export function loadChat() {
  const turns = read("localStorage", CHAT);
  return Array.isArray(turns) ? turns : [];
}

// Keeps the chat, without its images if it is too long. Returns a sentence for the user if something is not kept.
export function saveChat(turns) {
  if (write("localStorage", CHAT, turns)) return "";
  if (write("localStorage", CHAT, withoutImages(turns))) return "The images will not survive a reload: they are too large.";
  write("localStorage", CHAT, []);
  return "The chat will not survive a reload: it is too long, or the browser keeps nothing.";
}

export function loadSettings() {
  return { ...read("localStorage", SETTINGS), api_key: read("sessionStorage", KEY) ?? "" };
}

export function saveSettings({ api_key: key, ...settings }) {
  write("localStorage", SETTINGS, settings);
  write("sessionStorage", KEY, key);
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

// The chats that this browser keeps: their list, and which of them is shown.
import { deleteChat, listChats, loadChat, loadShown, onOthersChange, saveChat, saveShown } from "./store.js";

export class Chats {
  // `actions`: functions `open` with a chat's id, and `remove` with its id and title.
  constructor(list, actions) {
    this.list = list;
    this.actions = actions;
    this.id = loadShown() ?? newId();
    onOthersChange(() => this.show());
  }

  // Makes a chat the one that is shown; without an id, a new one. Returns its turns.
  choose(id = newId()) {
    this.id = id;
    saveShown(id);
    this.show();
    return loadChat(id);
  }

  // Keeps the turns of the chat that is shown; a chat without any is none. Returns a sentence for the user if something
  // is not kept.
  save(turns) {
    const fault = turns.length ? saveChat(this.id, turns) : "";
    this.show();
    return fault;
  }

  remove(id) {
    deleteChat(id);
    this.show();
  }

  show() {
    this.list.replaceChildren(...listChats().map((chat) => this.item(chat)));
  }

  item({ id, title }) {
    const item = document.getElementById("chat").content.firstElementChild.cloneNode(true);
    const [open, remove] = item.querySelectorAll("button");
    open.textContent = open.title = title;
    if (id === this.id) open.setAttribute("aria-current", "true");
    remove.ariaLabel = `Delete ${title}`;
    open.addEventListener("click", () => this.actions.open(id));
    remove.addEventListener("click", () => this.actions.remove(id, title));
    return item;
  }
}

function newId() {
  return `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}

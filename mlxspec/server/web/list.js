// The list of conversations: rows that are chosen, renamed and deleted, and the field that searches them.

import { byId, element } from "./render.js";
import { count } from "./words.js";

const SEARCH_MS = 150;
const LONGEST_NAME = 80;

export class List {
  #rows = byId("conversations");
  #search = byId("search");
  #state = byId("list-state");
  #store;
  #actions;
  #current = "";
  #shown = 0; // numbers the drawings: of two searches the later one is shown

  /** actions: {open(id), rename(head, name), remove(head)} */
  constructor(store, actions) {
    this.#store = store;
    this.#actions = actions;
    let timer = 0;
    this.#search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.show(), SEARCH_MS);
    });
    this.#search.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" || !this.#rows.firstChild) return;
      event.preventDefault();
      this.#rows.firstChild.firstChild.focus();
    });
    this.#rows.addEventListener("keydown", (event) => this.#move(event));
    this.#rows.addEventListener("focusin", ({ target }) => this.#reach(target.closest("li")));
  }

  /** Show what is kept now. current: the id of the conversation that is open. */
  async show(current = this.#current) {
    this.#current = current;
    const number = (this.#shown += 1);
    const text = this.#search.value.trim();
    let all, found;
    try {
      all = await this.#store.list();
      found = text ? await this.#store.search(text, all) : all;
    } catch {
      this.#state.textContent = "The list cannot be read. Load the page again.";
      return;
    }
    if (number !== this.#shown || this.#rows.querySelector("input")) return; // a name that is typed is not lost
    const focused = document.activeElement?.closest("#conversations li");
    const place = focused ? [...this.#rows.children].indexOf(focused) : -1;
    this.#rows.replaceChildren(...found.map((head) => this.#row(head)));
    this.#state.textContent = text ? `${count(found.length, "conversation")} found.` : all.length ? "" : "Nothing is kept yet.";
    this.#reach(this.#rows.querySelector("[aria-current]")?.closest("li") ?? this.#rows.firstChild);
    if (!focused) return;
    // focus stays in the list: on the same row, or on the one that took the place of a deleted one
    const row = byId(focused.id) ?? this.#rows.children[place] ?? this.#rows.lastChild;
    (row?.firstChild ?? this.#search).focus();
  }

  #row(head) {
    const isCurrent = head.id === this.#current;
    const open = element(
      "button",
      { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, onclick: () => this.#actions.open(head.id) },
      head.title,
      ...(head.excerpt ? [element("span", { class: "muted excerpt" }, head.excerpt)] : []),
    );
    const label = `Delete: ${head.title}`;
    const remove = element("button", { type: "button", class: "small", "aria-label": label, onclick: () => this.#actions.remove(head) }, "Delete");
    const rename = element("button", { type: "button", class: "small rename", "aria-label": `Rename: ${head.title}`, title: "Rename (F2)", onclick: () => this.#rename(head, open) }, "✎");
    return element("li", { id: `kept-${head.id}` }, open, element("span", { class: "acts" }, rename, remove));
  }

  /** A field takes the place of the title until Enter, which gives the name, or until it is left. */
  #rename(head, open) {
    const field = element("input", { type: "text", maxlength: LONGEST_NAME, "aria-label": `New name of: ${head.title}` });
    field.value = head.title;
    let isLeft = false; // a field that is taken away loses the focus, too
    const leave = () => {
      if (isLeft) return;
      isLeft = true;
      field.replaceWith(open);
      open.focus();
      this.show();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      const name = field.value.trim();
      leave();
      if (event.key === "Enter" && name !== head.title) this.#actions.rename(head, name);
    });
    field.addEventListener("blur", leave);
    open.replaceWith(field);
    field.select();
  }

  /** The Tab key reaches one row; the arrow keys go to the others. */
  #reach(row) {
    for (const button of this.#rows.querySelectorAll("button")) button.tabIndex = row?.contains(button) ? 0 : -1;
  }

  #move(event) {
    const row = event.target.closest("li");
    if (event.target instanceof HTMLInputElement) return;
    if (event.key === "F2") {
      event.preventDefault();
      row.querySelector(".rename").click();
      return;
    }
    const next = { ArrowDown: row.nextSibling, ArrowUp: row.previousSibling, Home: this.#rows.firstChild, End: this.#rows.lastChild }[event.key];
    if (!next) return;
    event.preventDefault();
    next.firstChild.focus();
  }
}

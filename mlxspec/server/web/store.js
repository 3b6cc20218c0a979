// Conversations kept in the browser. IndexedDB holds images too, and puts the writes of several tabs in order. Knows no DOM.
//
// "conversations" has what the list shows: {id, title, name, time, size, version}. "turns" and "images" have keys [id, number of the turn]: an
// answer that grows is written without the rest, and a search reads no images.

import { Conversation, areTurns } from "./conversation.js";

const STORES = ["conversations", "turns", "images"];
const MOST = { conversations: 1000, characters: 100_000_000 };
const EXCERPT = [30, 90]; // characters before and after what was searched for

/** The store, null where the browser keeps nothing: in some private windows, or where storage is switched off. */
export async function openStore() {
  try {
    const request = indexedDB.open("mlxspec", 1);
    request.onupgradeneeded = () => {
      const [conversations, ...others] = STORES;
      request.result.createObjectStore(conversations, { keyPath: "id" });
      for (const name of others) request.result.createObjectStore(name);
    };
    return new Store(await resultOf(request));
  } catch {
    return null;
  }
}

class Store {
  onchange = () => {}; // called with the id of a conversation that another tab has changed or deleted
  #db;
  #tabs = new BroadcastChannel("mlxspec");
  #sizes = new WeakMap(); // of each turn its characters

  constructor(db) {
    this.#db = db;
    db.onversionchange = () => db.close(); // a newer page of this server waits for that
    this.#tabs.onmessage = ({ data }) => this.onchange(data);
  }

  /** What is kept, without turns, the newest first. */
  async list() {
    const heads = await resultOf(this.#db.transaction("conversations").objectStore("conversations").getAll());
    return heads.sort((one, other) => other.time - one.time);
  }

  /** A conversation, null where it is not there or cannot be read. */
  async load(id) {
    const [heads, turns, images] = this.#open("readonly");
    const [head, found, places, urls] = await Promise.all(
      [heads.get(id), turns.getAll(from(id)), images.getAllKeys(from(id)), images.getAll(from(id))].map(resultOf),
    );
    places.forEach(([, number], i) => Object.assign(found[number] ?? {}, { images: urls[i] }));
    if (!head || !areTurns(found)) return null;
    for (const turn of found) this.#measure(turn);
    return new Conversation({ ...head, turns: found });
  }

  /**
   * Keep what has changed of a conversation. Returns "kept", or why nothing was written: "full", "elsewhere" where another tab has
   * changed or deleted it since it was loaded, "failed".
   */
  async save(conversation) {
    const written = conversation.changed;
    conversation.changed = new Set();
    let outcome = "kept";
    try {
      const stores = this.#open("readwrite");
      const all = await resultOf(stores[0].getAll());
      const { id, title, name, time, turns, version } = conversation;
      for (const turn of written) this.#measure(turn);
      const head = { id, title, name, time, size: turns.reduce((sum, turn) => sum + this.#sizes.get(turn), 0), version: version + 1 };
      const others = all.filter((other) => other.id !== id);
      if ((all.find((other) => other.id === id)?.version ?? 0) !== version) outcome = "elsewhere";
      else if (!fits([head, ...others])) outcome = "full";
      else write(stores, head, turns, written);
      await ended(stores[0].transaction);
      if (outcome === "kept") conversation.version += 1;
    } catch (error) {
      outcome = error?.name === "QuotaExceededError" ? "full" : "failed";
    }
    if (outcome !== "kept") conversation.changed = new Set([...written, ...conversation.changed]);
    return outcome;
  }

  async remove(id) {
    const stores = this.#open("readwrite");
    stores[0].delete(id);
    for (const store of stores.slice(1)) store.delete(from(id));
    await ended(stores[0].transaction);
  }

  /** Those of `heads` whose title or turns hold a text, in either case, with an excerpt where it is not in the title. */
  async search(text, heads) {
    const wanted = text.toLowerCase();
    const out = [];
    for (const head of heads) {
      const turns = await resultOf(this.#open("readonly")[1].getAll(from(head.id)));
      const turn = turns.find((one) => one.text.toLowerCase().includes(wanted));
      const isTitle = head.title.toLowerCase().includes(wanted);
      if (turn) out.push({ ...head, excerpt: isTitle ? "" : excerpt(turn.text, turn.text.toLowerCase().indexOf(wanted)) });
    }
    return out;
  }

  /** Tell other tabs that a conversation was changed or deleted. */
  announce(id) {
    this.#tabs.postMessage(id);
  }

  #open(mode) {
    const transaction = this.#db.transaction(STORES, mode);
    return STORES.map((name) => transaction.objectStore(name));
  }

  #measure(turn) {
    this.#sizes.set(turn, JSON.stringify(turn).length);
  }
}

function fits(heads) {
  return heads.length <= MOST.conversations && heads.reduce((sum, { size }) => sum + size, 0) <= MOST.characters;
}

/** All of it or nothing. */
function write([heads, texts, images], head, turns, written) {
  try {
    heads.put(head);
    turns.forEach((turn, number) => {
      if (!written.has(turn)) return;
      const { images: urls, ...rest } = turn;
      texts.put(rest, [head.id, number]);
      if (urls) images.put(urls, [head.id, number]);
      else images.delete([head.id, number]);
    });
    for (const store of [texts, images]) store.delete(from(head.id, turns.length));
  } catch (error) {
    heads.transaction.abort();
    throw error;
  }
}

/** The keys of a conversation's turns from number `first` on. */
function from(id, first = 0) {
  return IDBKeyRange.bound([id, first], [id, Infinity]);
}

function excerpt(text, at) {
  const start = Math.max(0, at - EXCERPT[0]);
  return (start ? "…" : "") + text.slice(start, at + EXCERPT[1]).replace(/\s+/g, " ");
}

function resultOf(request) {
  return new Promise((done, fail) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => fail(request.error);
  });
}

function ended(transaction) {
  return new Promise((done, fail) => {
    transaction.oncomplete = () => done();
    transaction.onabort = () => fail(transaction.error);
  });
}

// Files for the message that is being written: images as data: URLs, and texts as code in the message.

import { byId, element } from "./render.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// A photo of 10 MB says no more to a model than one of this size, and a browser would soon have kept its fill of them.
const [LARGEST, SIDE] = [1_000_000, 2048]; // bytes; pixels of the longer side of what is drawn again
const LONGEST = 1_000_000; // bytes of a text

/** Takes files that are chosen with the button, pasted into the message's field or dropped onto the page. */
export class Attachments {
  urls = [];
  #reading = 0; // choices of files that are being read
  #question;
  #page;

  /** question: the field. page: {sees(): whether the model reads images, notify(sentence), oninsert(): a text was put into the field} */
  constructor(question, page) {
    this.#question = question;
    this.#page = page;
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", async ({ target }) => {
      const files = [...target.files];
      target.value = ""; // the same file may be chosen again
      await this.#add(files);
    });
    question.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    document.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
  }

  get isReading() {
    return this.#reading > 0;
  }

  /** The images, of which none is left afterwards. */
  take() {
    const { urls } = this;
    this.urls = [];
    this.#show();
    return urls;
  }

  #take(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.#add([...files]);
  }

  /** Add images to the message and texts into it, and say what was left out. */
  async #add(files) {
    this.#reading += 1;
    const wrong = [];
    for (const file of files) {
      if (!(KINDS.includes(file.type) ? await this.#addImage(file) : await this.#addText(file))) wrong.push(file.name);
    }
    this.#reading -= 1;
    this.#show();
    const kinds = this.#page.sees() ? "Images are PNG, JPEG, WebP or GIF files; texts have at most 1 MB." : "This model reads texts only, of at most 1 MB.";
    this.#page.notify(wrong.length ? `Not attached: ${wrong.join(", ")}. ${kinds}` : "");
  }

  async #addImage(file) {
    if (!this.#page.sees()) return false;
    try {
      this.urls.push(await urlOf(file.size > LARGEST ? await smaller(file) : file));
      return true;
    } catch {
      return false;
    }
  }

  async #addText(file) {
    const text = await textOf(file);
    if (text === null) return false;
    const { selectionStart: from, selectionEnd: to } = this.#question;
    this.#question.setRangeText(fenced(file.name, text), from, to, "end");
    this.#page.oninsert();
    return true;
  }

  #show() {
    byId("images").replaceChildren(
      ...this.urls.map((url, i) => {
        const label = `Remove image ${i + 1}`;
        const remove = () => {
          this.urls.splice(i, 1);
          this.#show();
        };
        return element("li", {}, picture(url, i), element("button", { type: "button", class: "small", "aria-label": label, onclick: remove }, "Remove"));
      }),
    );
    byId("images").hidden = this.urls.length === 0;
    this.#question.focus({ preventScroll: true });
  }
}

/** The element that shows an image of a message. */
export function picture(url, i) {
  return element("img", { src: url, alt: `Image ${i + 1}`, class: "picture" });
}

/** The text of a file, null where it is none or too long. */
export async function textOf(file) {
  if (file.size > LONGEST) return null;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/** A text as code with its name, in a fence that is longer than all in it. */
export function fenced(name, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}${/\.(\w+)$/.exec(name)?.[1] ?? ""}\n${text.replace(/\n?$/, "\n")}${fence}\n`;
}

async function smaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(scale * bitmap.width)), Math.max(1, Math.round(scale * bitmap.height)));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // below what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 });
}

function urlOf(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}

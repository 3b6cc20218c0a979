// The images of the message that is being written, as data: URLs. They are sent as they were chosen: the server resizes them.

import { element } from "./render.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export class Images {
  urls = [];
  #list;
  #onchange;

  /** list: the element that shows them. onchange(): called when there are more or fewer of them. */
  constructor(list, onchange) {
    this.#list = list;
    this.#onchange = onchange;
  }

  /** Take files; returns the sentence that says which were left out, "" where none was. */
  async add(files) {
    const wrong = files.filter((file) => !KINDS.includes(file.type));
    const right = files.filter((file) => KINDS.includes(file.type));
    const found = await Promise.allSettled(right.map(read));
    this.urls.push(...found.filter((f) => f.status === "fulfilled").map((f) => f.value));
    wrong.push(...right.filter((_, i) => found[i].status === "rejected"));
    this.#show();
    return wrong.length ? `Not attached: ${wrong.map((file) => file.name).join(", ")}. Images are PNG, JPEG, WebP or GIF files.` : "";
  }

  /** The images, of which none is left afterwards. */
  take() {
    const { urls } = this;
    this.urls = [];
    this.#show();
    return urls;
  }

  #show() {
    this.#list.replaceChildren(
      ...this.urls.map((url, i) => {
        const label = `Remove image ${i + 1}`;
        const remove = () => {
          this.urls.splice(i, 1);
          this.#show();
        };
        return element("li", {}, picture(url, i), element("button", { type: "button", class: "small", "aria-label": label, onclick: remove }, "Remove"));
      }),
    );
    this.#list.hidden = this.urls.length === 0;
    this.#onchange();
  }
}

/** The element that shows an image of a message. */
export function picture(url, i) {
  return element("img", { src: url, alt: `Image ${i + 1}`, class: "picture" });
}

function read(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });
}

// The pictures of the question: chosen, dropped or pasted; moved and removed, by mouse or keyboard.

import { byId, el, reconcile, say, show } from "./dom.js";
import { bytes, count } from "./format.js";

export class Pictures {
  // changed() is called whenever there are others, or in another order.
  constructor(changed) {
    this.list = []; // {id, name, type, size, url, file}
    this.changed = changed;
    this.added = 0;
    this.dragged = null;
    this.listElement = byId("pictures");
    this.input = byId("files");
    this.zone = byId("drop");
    this.input.addEventListener("change", () => {
      this.add(this.input.files);
      this.input.value = ""; // so that the same file can be chosen again
    });
    this.listenForDrops();
    document.addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    this.show();
  }

  listenForDrops() {
    const isFiles = (event) => event.dataTransfer?.types.includes("Files");
    // A file that misses the zone would else take the place of the page.
    for (const name of ["dragover", "drop"]) {
      window.addEventListener(name, (event) => isFiles(event) && event.preventDefault());
    }
    this.zone.addEventListener("dragover", (event) => {
      if (isFiles(event)) this.zone.classList.add("over");
    });
    this.zone.addEventListener("dragleave", (event) => {
      if (!this.zone.contains(event.relatedTarget)) this.zone.classList.remove("over");
    });
    this.zone.addEventListener("drop", (event) => {
      this.zone.classList.remove("over");
      if (isFiles(event)) this.add(event.dataTransfer.files);
    });
  }

  add(files) {
    const refused = [];
    for (const file of files) {
      if (file.type.startsWith("image/")) this.list.push(this.entry(file));
      else refused.push(file.name);
    }
    const warning = byId("pictures-refused");
    show(warning, refused.length > 0);
    say(warning, refused.length ? `No picture, so left out: ${refused.join(", ")}` : "");
    this.show();
    if (this.list.length) this.tell(`${count(this.list.length, "picture")} in the question`);
  }

  entry(file) {
    this.added += 1;
    const id = `picture-${this.added}`;
    return {
      id,
      name: file.name || `${id}.${file.type.slice("image/".length)}`,
      type: file.type,
      size: file.size,
      url: URL.createObjectURL(file),
      file,
    };
  }

  move(entry, to) {
    const from = this.list.indexOf(entry);
    if (from < 0 || to < 0 || to >= this.list.length || to === from) return;
    this.list.splice(from, 1);
    this.list.splice(to, 0, entry);
    const focused = document.activeElement;
    this.show();
    focused?.focus(); // an element that is moved loses it
    this.tell(`${entry.name} is now picture ${to + 1} of ${this.list.length}`);
  }

  remove(entry) {
    const place = this.list.indexOf(entry);
    if (place < 0) return;
    this.list.splice(place, 1);
    URL.revokeObjectURL(entry.url);
    this.show();
    const next = this.listElement.children[Math.min(place, this.list.length - 1)];
    (next?.querySelector("[data-do=remove]") ?? this.input).focus();
    this.tell(`${entry.name} removed; ${count(this.list.length, "picture")} left`);
  }

  tell(text) {
    say(byId("pictures-status"), text);
  }

  show() {
    const last = this.list.length - 1;
    reconcile(
      this.listElement,
      this.list,
      (entry) => entry.id,
      (entry) => this.make(entry),
      (item, entry) => {
        const place = this.list.indexOf(entry);
        say(item.querySelector(".place"), `#${place + 1}`);
        // Not `disabled`: the button keeps its focus at the end of the way.
        item.querySelector("[data-do=earlier]").setAttribute("aria-disabled", String(place === 0));
        item.querySelector("[data-do=later]").setAttribute("aria-disabled", String(place === last));
      },
    );
    this.changed();
  }

  make(entry) {
    const button = (what, sign, label, action) => {
      const made = el("button", { type: "button", "data-do": what, title: label, "aria-label": `${label}: ${entry.name}` }, sign);
      made.addEventListener("click", action);
      return made;
    };
    const item = el(
      "li",
      { draggable: "true" },
      el("img", { src: entry.url, alt: entry.name, draggable: "false" }),
      el("span", { class: "place" }),
      el("span", { class: "name", title: entry.name }, entry.name),
      el("span", { class: "hint" }, bytes(entry.size)),
      el(
        "span",
        { class: "picture-buttons" },
        button("earlier", "←", "Earlier", () => this.move(entry, this.list.indexOf(entry) - 1)),
        button("later", "→", "Later", () => this.move(entry, this.list.indexOf(entry) + 1)),
        button("remove", "×", "Remove", () => this.remove(entry)),
      ),
    );
    item.addEventListener("dragstart", (event) => {
      this.dragged = entry;
      event.dataTransfer.effectAllowed = "move";
    });
    item.addEventListener("dragend", () => (this.dragged = null));
    item.addEventListener("dragover", (event) => {
      if (this.dragged) event.preventDefault();
    });
    item.addEventListener("drop", (event) => {
      if (!this.dragged) return;
      event.preventDefault();
      this.move(this.dragged, this.list.indexOf(entry));
    });
    return item;
  }

  // All pictures as parts of a message.
  async parts() {
    return Promise.all(
      this.list.map(async ({ file }) => ({ type: "image_url", image_url: { url: await dataUri(file) } })),
    );
  }
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

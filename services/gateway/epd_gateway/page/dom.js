// Elements without markup: what a server or a user says is only ever text.

// el("p", {class: "hint"}, "text", child): attributes by name; null and false leave one out.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

// Sets a text only where it is another one, so that a screen reader does not hear it again.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, shown) {
  element.hidden = !shown;
}

// Makes a parent's children those of a list, by key: they stay the same elements, with their focus.
// make(entry) gives an element, update(element, entry) brings it up to date.
export function reconcile(parent, entries, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const entry of entries) {
    const key = String(keyOf(entry));
    let child = old.get(key);
    old.delete(key);
    if (!child) {
      child = make(entry);
      child.dataset.key = key;
      parent.insertBefore(child, next);
    } else if (child === next) {
      next = next.nextElementSibling;
    } else {
      parent.insertBefore(child, next);
    }
    update(child, entry);
  }
  for (const gone of old.values()) gone.remove();
}

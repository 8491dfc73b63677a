// Figures as people read them.

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1000;
  if (ms < 0.05) return "0 ms";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

export function age(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return `${Math.floor(seconds / 3600)} h ago`;
}

const UNITS = ["B", "KB", "MB", "GB", "TB"];

export function bytes(count) {
  let unit = 0;
  let left = count ?? 0;
  while (left >= 1000 && unit < UNITS.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${left < 10 && unit ? left.toFixed(1) : left.toFixed(0)} ${UNITS[unit]}`;
}

export const count = (number, one, several = `${one}s`) => `${number} ${number === 1 ? one : several}`;

// Enough of an id to know it by.
export const short = (id) => (id.length > 12 ? id.slice(0, 8) : id);

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString(undefined, { hour12: false });
}

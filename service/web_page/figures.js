// Numbers as text. A missing value is a dash; NaN and Infinity keep their names.

export const UNKNOWN = "–";

const known = value => typeof value === "number" && Number.isFinite(value);
const spaced = (value, unit) => `${value}\u00a0${unit}`;
const digits = value => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

const BINARY = [1024, "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const DECIMAL = [1000, "B", "kB", "MB", "GB", "TB", "PB", "EB"];

function scaled(value, [base, ...units]) {
  if (!known(value)) return UNKNOWN;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= base;
    unit++;
  }
  return spaced(unit === 0 ? value.toFixed(0) : digits(value), units[unit]);
}

/** Bytes of memory or of a disk, with three digits. */
export const bytes = value => scaled(value, BINARY);

/** Transferred bytes, in units of 1000, as is usual for disks and networks. */
export const moved = value => scaled(value, DECIMAL);

export const rate = value => (known(value) ? `${moved(value)}/s` : UNKNOWN);

/** A duration. */
export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value <= 0) return spaced("0", "s");
  if (value < 0.9995e-3) return spaced(digits(value * 1e6), "µs");
  if (value < 0.9995) return spaced(digits(value * 1e3), "ms");
  if (value < 119.5) return spaced(digits(value), "s");
  if (value < 7170) return `${spaced(Math.floor(value / 60), "min")} ${spaced(Math.floor(value % 60), "s")}`;
  if (value < 172800)
    return `${spaced(Math.floor(value / 3600), "h")} ${spaced(Math.floor((value % 3600) / 60), "min")}`;
  return spaced((value / 86400).toFixed(1), "days");
}

/** A fraction as a percentage. */
export function percent(share) {
  if (!known(share)) return UNKNOWN;
  const value = 100 * share;
  return spaced(
    value > 0 && value < 0.1 ? "< 0.1" : value < 9.95 && value > 0 ? value.toFixed(1) : value.toFixed(0),
    "%",
  );
}

export const count = value => (known(value) ? Math.round(value).toLocaleString("en") : UNKNOWN);

/** A number with a few digits: a loss, a norm, samples per second. The API sends NaN and Infinity as strings. */
export function plain(value) {
  if (typeof value === "string") return value === "NaN" ? "diverged" : "infinite";
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6))
    return value.toExponential(2).replace("-", "−").replace("e+", "e");
  return size >= 1000
    ? count(value)
    : size >= 100
      ? value.toFixed(1)
      : size >= 1
        ? value.toFixed(3)
        : value.toFixed(4);
}

/** A number with three digits. */
export function rough(value) {
  if (!known(value)) return plain(value);
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e6) return count(value);
  return size !== 0 && (size < 1e-2 || size >= 1e6)
    ? value.toExponential(1).replace(".0", "").replace("e+", "e").replace(/-/g, "−")
    : digits(value);
}

/** The time of day of a Unix time. */
export const clock = at => (known(at) ? new Date(at * 1000).toLocaleTimeString("en-GB") : UNKNOWN);

export const sum = numbers => numbers.reduce((total, value) => total + (known(value) ? value : 0), 0);
export const most = numbers =>
  numbers.reduce((top, value) => (known(value) && (top === null || value > top) ? value : top), null);
export const plural = (number, noun, nouns = `${noun}s`) => `${count(number)} ${number === 1 ? noun : nouns}`;

// Numbers, times and states as words: the same everywhere on the page.
export const number = new Intl.NumberFormat("en");
export const count = (n) => (n === undefined ? "–" : number.format(n));
export const each = (n) => (n === undefined ? "–" : n >= 100 ? number.format(Math.round(n)) : n >= 10 ? n.toFixed(0) : n > 0 ? n.toFixed(1) : "0");
export const size = (n) => { for (const u of ["B", "KiB", "MiB", "GiB"]) { if (n < 1024) return `${n < 10 && u !== "B" ? n.toFixed(1) : Math.round(n)} ${u}`; n /= 1024; } return `${n.toFixed(1)} TiB`; };
export const time = (s) => { s = Math.max(0, s); if (s < 60) return `${Math.floor(s)} s`; if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`; if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`; return `${Math.floor(s / 86400)} d`; };
export const short = (s) => (s < 100 ? `${Math.max(0, Math.floor(s))} s` : s < 6000 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`);
export const several = (n, what) => `${count(n)} ${n === 1 ? what : what + "s"}`;

export const bound = (n) => (Math.abs(n) >= 1000 ? `${+(n / 1024).toFixed(1)}k` : `${+n.toPrecision(2)}`);

export const CELLS = { t: "there", f: "failed", a: "asked again", b: "begun", m: "missing" };
export const SIGNS = { f: "×", a: "↻", b: "•" };

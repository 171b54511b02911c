// Keys only: every page works without this. A key moves the focus and never decides anything by itself.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input, textarea, select")) return;
  const rows = [...document.querySelectorAll("table.queue a.go")];
  const go = (selector) => document.querySelector(selector)?.click();
  const move = (by) => {
    const at = rows.indexOf(document.activeElement);
    const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
    rows[next]?.focus();
    rows[next]?.scrollIntoView({ block: "nearest" });
  };
  const actions = {
    j: () => (rows.length ? move(1) : go("a[rel=next]")),
    k: () => (rows.length ? move(-1) : go("a[rel=prev]")),
    q: () => go("header a[accesskey=q]"),
    a: () => document.querySelector("button.yes")?.focus(),
    r: () => document.querySelector(".decide textarea")?.focus(),
    o: () => {
      const parts = [...document.querySelectorAll("main details")];
      const open = !parts.every((d) => d.open);
      parts.forEach((d) => (d.open = open));
    },
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
});

// Asks for the page again every few seconds and puts in what has changed; scroll position and opened parts stay.
(() => {
  const bar = document.getElementById("live");
  let tag = bar.dataset.tag;
  const age = () => {
    const at = Date.parse(bar.dataset.last), word = bar.querySelector("time");
    if (Number.isNaN(at)) return;
    const s = Math.max(0, Math.round((Date.now() - at) / 1000));
    word.textContent = s < 100 ? `${s} s ago` : s < 6000 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`;
  };
  const titles = (where) => [...where.querySelectorAll("details")].map((d) => d.querySelector("summary").textContent);
  const look = async () => {
    try {
      const got = await fetch(location.pathname, { headers: { "If-None-Match": tag }, cache: "no-store" });
      bar.classList.toggle("gone", !(got.ok || got.status === 304));
      if (got.status === 200) {
        tag = got.headers.get("ETag");
        const page = new DOMParser().parseFromString(await got.text(), "text/html");
        const [old, fresh] = [document.querySelector("main"), page.querySelector("main")];
        const open = new Set([...old.querySelectorAll("details[open]")].map((d) => d.querySelector("summary").textContent));
        const known = new Set(titles(old));
        for (const d of fresh.querySelectorAll("details")) {
          const title = d.querySelector("summary").textContent;
          if (known.has(title)) d.open = open.has(title);
        }
        old.replaceWith(fresh);
        const next = page.getElementById("live");
        bar.dataset.last = next.dataset.last;
        bar.querySelector("span").textContent = next.querySelector("span").textContent;
        bar.classList.toggle("ended", next.classList.contains("ended"));
      }
    } catch {
      bar.classList.add("gone");
    }
    age();
  };
  age();
  setInterval(age, 1000);
  setInterval(look, 3000);
})();

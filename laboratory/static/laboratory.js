// Without this file each button is a form, and the page comes back. With it, the page stays where it is.
const said = document.getElementById("said");
let busy = false;

async function press(form) {
  const button = form.querySelector("button");
  busy = true;
  button.setAttribute("aria-busy", "true");
  said.textContent = `${button.textContent}: running in both shops`;
  for (const verdict of document.querySelectorAll(".verdict")) {
    verdict.className = "verdict";  // that of the story before is none of this one
    verdict.textContent = "Running …";
  }
  try {
    const answer = await fetch(form.action, { method: "POST" });
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of ["#story", ".buttons"]) {
      document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)));
    }
    const again = document.querySelector(`form[action="${form.getAttribute("action")}"] button`);
    again.focus({ preventScroll: true });
    const lanes = [...document.querySelectorAll(".lane")].map((lane) =>
      `${lane.querySelector("h3").textContent}: ${lane.querySelector(".verdict").textContent.trim()}`);
    said.textContent = lanes.join(" ");
    const verdicts = [...document.querySelectorAll(".verdict")];
    const places = verdicts.map((verdict) => verdict.getBoundingClientRect());
    if (places.some((place) => place.top < 0 || place.bottom > innerHeight)) {
      document.getElementById("told").scrollIntoView();
    }
  } catch (error) {
    said.textContent = "No response: is the demo still running?";
    said.classList.remove("hidden");
    for (const verdict of document.querySelectorAll(".verdict")) verdict.textContent = "";
    button.removeAttribute("aria-busy");
  }
  busy = false;
}

document.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!busy) press(event.target);
});

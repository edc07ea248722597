const note = document.getElementById("status");
function look() {
  const seconds = Date.now() / 1000 - note.dataset.written;
  if (seconds < note.dataset.late) return;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  const ago = hours ? hours + " h " + minutes % 60 + " min" : minutes + " min";
  const written = new Date(1000 * note.dataset.written).toISOString().slice(0, 19).replace("T", " ");
  note.className = "status failed";
  note.querySelector("strong").textContent = "Nothing heard for " + ago + ", since step " + note.dataset.step + ".";
  note.querySelector("span").textContent = "Written " + written
    + " UTC. The run was killed, is stalled, or is in a long evaluation or save: toolkit status tells which.";
}
look();
setInterval(look, 10000);

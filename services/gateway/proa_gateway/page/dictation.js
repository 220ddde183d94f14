// A recording from the microphone, made between two clicks on a button.

export class Dictation {
  // `onRecorded` is called with a recording as a Blob, `onFailed` with a sentence for the user. `media`, `Recorder`: the
  // browser's.
  constructor(button, { onRecorded, onFailed }, media = navigator.mediaDevices, Recorder = globalThis.MediaRecorder) {
    this.button = button;
    this.media = media;
    this.Recorder = Recorder;
    this.onRecorded = onRecorded;
    this.onFailed = onFailed;
    this.recorder = null; // while it records
    this.isStarting = false; // while the user is asked for permission
    button.addEventListener("click", () => this.toggle());
  }

  // Browsers let pages record over HTTPS and on this machine only.
  get isPossible() {
    return Boolean(this.media?.getUserMedia && this.Recorder);
  }

  async toggle() {
    if (this.recorder) return this.recorder.stop();
    if (this.isStarting) return;
    this.isStarting = true;
    try {
      this.record(await this.media.getUserMedia({ audio: true }));
    } catch (error) {
      this.onFailed(`The microphone cannot be used: ${error.message}`);
    } finally {
      this.isStarting = false;
    }
  }

  record(stream) {
    const parts = [];
    const recorder = new this.Recorder(stream);
    recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
    recorder.addEventListener("stop", () => {
      for (const track of stream.getTracks()) track.stop(); // the browser shows that the microphone is off
      this.recorder = null;
      this.show();
      this.onRecorded(new Blob(parts, { type: recorder.mimeType }));
    });
    recorder.start();
    this.recorder = recorder;
    this.show();
  }

  show() {
    this.button.setAttribute("aria-pressed", String(Boolean(this.recorder)));
  }
}

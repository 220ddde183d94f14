// The images that go with the next message: chosen as files, pasted or dropped, and shown until it is sent.

export class Images {
  constructor(list) {
    this.list = list;
    this.urls = []; // data URLs
  }

  async add(files) {
    const images = files.filter((file) => file.type.startsWith("image/"));
    for (const url of await Promise.all(images.map(dataUrl))) this.addUrl(url);
  }

  addUrl(url) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Remove the image";
    button.append(thumbnail(url));
    button.addEventListener("click", () => {
      this.urls.splice(this.urls.indexOf(url), 1);
      const next = button.nextElementSibling ?? button.previousElementSibling;
      button.remove();
      next?.focus();
    });
    this.urls.push(url);
    this.list.append(button);
  }

  // The images' URLs; they are no longer attached then.
  take() {
    const { urls } = this;
    this.urls = [];
    this.list.replaceChildren();
    return urls;
  }
}

export function thumbnail(url) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = "attached image";
  return image;
}

// A picture for the first screen's example.
export function drawing() {
  const canvas = Object.assign(document.createElement("canvas"), { width: 224, height: 224 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, 224, 224);
  pen.fillStyle = "red";
  pen.arc(112, 112, 80, 0, 2 * Math.PI);
  pen.fill();
  return canvas.toDataURL("image/png");
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

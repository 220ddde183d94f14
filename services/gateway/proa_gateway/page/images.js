// The images that go with the next message: chosen as files or pasted, and shown as thumbnails until it is sent.

export class Images {
  constructor(list) {
    this.list = list;
    this.urls = []; // data URLs
  }

  async add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    for (const url of await Promise.all(images.map(dataUrl))) {
      this.urls.push(url);
      const image = thumbnail(url);
      image.title = "Click to remove";
      image.addEventListener("click", () => {
        this.urls.splice(this.urls.indexOf(url), 1);
        image.remove();
      });
      this.list.append(image);
    }
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

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

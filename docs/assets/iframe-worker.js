// From the disk (file:) browsers start no workers, and material's search is one. There it runs in a frame of the page,
// which gets a worker's way to send; nothing is fetched from the net for it.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentDocument
      this.frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = inside.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        inside.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }

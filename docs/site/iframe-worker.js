// The search runs in a worker, which browsers refuse to pages that are files. There it runs in a hidden frame, by the same interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const script = inside.document.createElement("script");
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      script.addEventListener("load", () => {
        this.deliver = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.waiting.forEach(this.deliver);
      });
      script.src = url;
      inside.document.body.appendChild(script);
    }
    postMessage(data) {
      this.deliver ? this.deliver(data) : this.waiting.push(data);
    }
    terminate() {}
  };
}

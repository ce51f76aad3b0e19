// Search runs in a Worker, which browsers refuse to pages opened from the disk. There a hidden frame stands in for it:
// the same script, in a window of its own, with the messages of a worker.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.early = [];
      const address = new URL(url, document.baseURI).href;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const answer = data => {
        const event = new MessageEvent("message", {data});
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inside.postMessage = data => setTimeout(() => answer(data));
      inside.importScripts = (...addresses) => Promise.all(addresses.map(each => load(new URL(each, address).href)));
      const load = source => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = failed;
        inside.document.head.append(script);
      });
      load(address).then(() => {
        const waiting = this.early;
        this.early = null;
        waiting.forEach(data => this.postMessage(data));
      });
    }
    postMessage(data) {
      if (this.early) return void this.early.push(data);
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", {data}));
    }
    terminate() {
      this.frame.remove();
    }
  };
}

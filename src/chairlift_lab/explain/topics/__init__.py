"""One module for each topic, with a value TOPIC; its page is `pages/NAME.md`."""

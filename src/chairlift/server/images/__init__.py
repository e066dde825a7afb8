"""Images of requests: fetched, decoded and prepared in the front end."""

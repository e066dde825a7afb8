"""HTTP: routes, guards, bodies, errors and streams."""

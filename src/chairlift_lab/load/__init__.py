"""Load on a server: arrivals, traces, client and figures."""

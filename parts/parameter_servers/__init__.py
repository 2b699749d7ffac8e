"""Variables on servers, which workers pull and push at their pace. Runs on hosts; a worker's steps are replica code."""

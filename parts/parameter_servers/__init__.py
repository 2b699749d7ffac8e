"""Variables on servers, which workers pull and push as fast as each can: strategy, placement, servers' processes."""

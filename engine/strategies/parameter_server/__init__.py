"""Parameter servers: variables on servers, workers that pull and push as fast as each can."""

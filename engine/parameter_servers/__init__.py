"""Trains variables on servers, which workers pull and push as fast as each can. Runs on the coordinator and workers."""

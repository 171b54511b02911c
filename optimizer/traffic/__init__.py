"""What is sent to a served engine and what comes back: prompts, client, load generator, AIPerf."""

"""The engine being optimised: Qwen3, tensor parallel, paged KV cache, an HTTP server with vLLM's surface."""

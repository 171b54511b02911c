"""Side-by-side reports (terminal, HTML, PNG, Markdown, Perfetto) and the trace-diff command line."""

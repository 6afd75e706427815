"""Tables of result files, and what is made of them: Markdown, pages and charts."""

"""Pure string machines: tokens to text and back, chat templates, stop strings. Imports tokenizers and jinja2 only."""

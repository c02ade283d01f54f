"""One page that says what runs were and how they went: `finetune report`. Imports no torch but to preview data."""

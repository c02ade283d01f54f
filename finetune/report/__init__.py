"""The page of `finetune report`, about one run or several. Imports torch only to preview data."""

"""The tasks of `mtjax finetune`: their files, fields, metrics and goals."""

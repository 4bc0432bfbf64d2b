"""Code that loads a published model, for the model card and for the card of a run."""

import json

PROMPT = "Hello"
"""The prompt of the code; a person writes another."""
NEW_TOKENS = 64


def load_code(place: str, base: str | None, *, conversations: bool) -> str:
    """Return a program that loads a model and answers a prompt with it.

    `place` is its folder, or its name on the Hugging Face hub; `base` the base model's, for an adapter alone.
    """
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    load = ["model = AutoModelForCausalLM.from_pretrained(place)"]
    places = [f"place = {place!r}"]
    if base is not None:
        imports.insert(0, "from peft import PeftModel")
        places.append(f"base = {base!r}")
        load = [
            "model = AutoModelForCausalLM.from_pretrained(base)",
            "model = PeftModel.from_pretrained(model, place)",
        ]
    lines = [
        *imports,
        "",
        *places,
        "tokenizer = AutoTokenizer.from_pretrained(place)",
        *load,
        *_inputs(conversations=conversations),
        f"output = model.generate(**inputs, max_new_tokens={NEW_TOKENS})",
        'answer = output[0, inputs["input_ids"].shape[1] :]',
        "print(tokenizer.decode(answer, skip_special_tokens=True))",
    ]
    return "\n".join(lines)


def load_command(place: str, base: str | None, *, conversations: bool) -> str:
    """Return a line of Python that loads a model as `load_code` does, for a shell."""
    if base is not None:
        return (
            "from peft import PeftModel; from transformers import AutoModelForCausalLM; "
            f"print(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({_text(base)}), {_text(place)}))"
        )
    prompt = _text(PROMPT)
    if conversations:
        prompt = f'[{{"role": "user", "content": {prompt}}}]'
    return f'from transformers import pipeline; print(pipeline("text-generation", {_text(place)})({prompt}))'


def _text(value: str) -> str:
    # In double quotes, because a shell gets the line in single quotes.
    return json.dumps(value, ensure_ascii=False)


def _inputs(*, conversations: bool) -> list[str]:
    """Return the lines that encode the prompt as training encoded its prompts."""
    if not conversations:
        return [f'inputs = tokenizer("{PROMPT}", return_tensors="pt")']
    message = f'[{{"role": "user", "content": "{PROMPT}"}}]'
    return [
        "inputs = tokenizer.apply_chat_template(",
        f"    {message}, add_generation_prompt=True,",
        '    return_tensors="pt", return_dict=True,',
        ")",
    ]

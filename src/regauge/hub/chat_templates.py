"""Chat templates that recipes select by name. Each template has the name of the model that uses the template's format.

References:
    Taori et al. (2023), Stanford Alpaca, whose headings the template `alpaca` uses; for all other templates, the model
    cards of OpenAI's ChatML, Llama 3, Mistral 7B Instruct v0.2 and EXAONE 3.5.
"""

_PROMPT = "{%% if add_generation_prompt %%}{{ %s }}{%% endif %%}"

TEMPLATES = {
    "alpaca": (
        r"{% set titles = {'user': '### Instruction:\n', 'user_context': '### Input:\n', "
        r"'assistant': '### Response:\n'} %}"
        r"{% for one in messages if one.role == 'system' or one.role in titles %}"
        r"{{ titles.get(one.role, '') + one.content | trim + ('' if loop.last else '\n\n') }}{% endfor %}"
        + _PROMPT
        % r"'\n\n### Response:\n'"
    ),
    "chatml": (
        r"{% for one in messages %}{{ '<|im_start|>' ~ one.role ~ '\n' ~ one.content ~ '<|im_end|>\n' }}{% endfor %}"
        + _PROMPT % r"'<|im_start|>assistant\n'"
    ),
    "exaone": (
        r"{% if messages[0].role != 'system' %}{{ '[|system|][|endofturn|]\n' }}{% endif %}"
        r"{% for one in messages %}{{ '[|' ~ one.role ~ '|]' ~ one.content }}"
        r"{{ '\n' if one.role == 'user' else '[|endofturn|]\n' }}{% endfor %}" + _PROMPT % "'[|assistant|]'"
    ),
    "llama3": (
        r"{{ bos_token }}{% for one in messages %}{{ '<|start_header_id|>' ~ one.role ~ '<|end_header_id|>\n\n' ~ "
        r"one.content | trim ~ '<|eot_id|>' }}{% endfor %}"
        + _PROMPT
        % r"'<|start_header_id|>assistant<|end_header_id|>\n\n'"
    ),
    "mistral": (
        r"{% set start = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
        r"{{ bos_token }}{% for one in (messages[1:] if start else messages) %}"
        r"{% if one.role != ('assistant' if loop.index0 % 2 else 'user') %}"
        r"{{ raise_exception('user and assistant take turns here, after a system message at most') }}{% endif %}"
        r"{% if one.role == 'user' %}{{ ' [INST] ' ~ (start if loop.first else '') ~ one.content ~ ' [/INST]' }}"
        r"{% else %}{{ ' ' ~ one.content ~ eos_token }}{% endif %}{% endfor %}"
    ),
}
"""Chat templates in Jinja, by name."""

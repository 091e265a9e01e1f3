"""The prompts of LongBench's 21 tasks, around a record's context and input.

The questions, the order of context and input and the cue for the answer are the benchmark's. So are the words that its
metrics look for ("unanswerable", "Paragraph N", "段落N"). The sentences are our own. So scores compare with each other,
but with published ones only as far as the wording does not matter to a model. A record with a whole `prompt` of its own
is asked with that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """A task's prompt: `before` + context, then, as the question, `after` with the input instead of its "{input}".

    `starts` is the beginning of the question in the prompts of LongBench's authors. In a record with a whole prompt of
    its own, the question begins at the last occurrence of `starts`.
    """

    before: str
    after: str
    starts: str

    def question(self, text: str) -> str:
        return self.after.replace("{input}", text)


_SHORT = "Reply with the answer alone, without any other words."
_YES_NO = (
    "Keep it to a phrase or one sentence. A question that the article does not answer gets the answer "
    '"unanswerable"; a yes-or-no question gets "yes", "no" or "unanswerable". Explain nothing.'
)
_PASSAGES = Prompt(
    f"Below are several passages, and after them a question about them. {_SHORT}\n\nPassages:\n",
    f"\n\nUse the passages above to answer the question. {_SHORT}\n\nQuestion: {{input}}\nAnswer:",
    "\n\nQuestion: ",
)

PROMPTS: dict[str, Prompt] = {
    "narrativeqa": Prompt(
        "Below is a story (a novel or the script of a film), and after it a question. Answer in as few words as you "
        "can, at best in one phrase, and explain nothing.\n\nStory: ",
        "\n\nNow answer the question about the story in as few words as you can, without an explanation.\n\n"
        "Question: {input}\n\nAnswer:",
        "\n\nQuestion: ",
    ),
    "qasper": Prompt(
        f"Below is a scientific article, and after it a question. {_YES_NO}\n\nArticle: ",
        f"\n\nAnswer the question from the article above. {_YES_NO}\n\nQuestion: {{input}}\n\nAnswer:",
        "\n\nQuestion: ",
    ),
    "multifieldqa_en": Prompt(
        "Read this text; a short answer will be wanted.\n\n",
        f"\n\nNow answer a question about the text above. {_SHORT}\n\nQuestion: {{input}}\nAnswer:",
        "\n\nQuestion: ",
    ),
    "multifieldqa_zh": Prompt(
        "请阅读下面的文字，并用中文简要作答：\n\n",
        "\n\n请根据以上文字回答问题，只写出答案，不要写别的内容。\n\n问题：{input}\n回答：",
        "\n\n问题：",
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": Prompt(
        "下面给出几篇文章，请根据文章回答最后的问题。\n\n文章：",
        "\n\n请根据以上文章回答问题。\n\n问题：{input}\n回答：",
        "\n\n问题：",
    ),
    "gov_report": Prompt(
        "Below is the report of a government agency. It is to be summarized on one page.\n\nReport:\n",
        "\n\nNow write the summary of the report, one page long.\n\nSummary:",
        "\n\nNow, write ",
    ),
    "qmsum": Prompt(
        "Below is the transcript of a meeting, and after it a query: a question or an instruction. Reply in one or a "
        "few sentences.\n\nTranscript:\n",
        "\n\nNow reply to the query about the meeting above in one or a few sentences.\n\nQuery: {input}\nAnswer:",
        "\n\nQuery: ",
    ),
    "multi_news": Prompt(
        "Below are several news passages. They are to be summarized together on one page.\n\nNews:\n",
        "\n\nNow write one summary of all the news, one page long.\n\nSummary:",
        "\n\nNow, write ",
    ),
    "vcsum": Prompt(
        "下面是一次会议的记录，请在阅读之后写一段话来总结会议内容。\n会议记录：\n", "\n\n会议总结：", "\n\n会议总结："
    ),
    "trec": Prompt(
        "Say of which type the last question is. The questions before it show what the types are.\n\n",
        "\n{input}",
        "\nQuestion: ",
    ),
    "triviaqa": Prompt(
        f"Answer the last question from its passage. {_SHORT} Some examples come first.\n\n",
        "\n\n{input}",
        "\nPassage:\n",
    ),
    "samsum": Prompt(
        "Summarize the last dialogue in a few short sentences, as in the examples before it.\n\n",
        "\n\n{input}",
        "\nDialogue: ",
    ),
    "lsht": Prompt("请参照下面的例子，判断最后一则新闻属于哪个类别。\n\n", "\n{input}", "\n新闻内容："),
    "passage_count": Prompt(
        "Below are paragraphs from Wikipedia, some of which may be there more than once. Read them with care and count "
        "how many different paragraphs there are, duplicates not counted again.\n\n",
        "\n\nGive the number of different paragraphs. Write the number alone, such as 1, 2 or 3.\n\n"
        "The final answer is: ",
        "\n\nPlease enter the final count",
    ),
    "passage_retrieval_en": Prompt(
        "Below are 30 paragraphs from Wikipedia, and after them an abstract of one of them. Find out which paragraph "
        "it is the abstract of.\n\n",
        "\n\nThis is the abstract:\n\n{input}\n\nGive the number of the paragraph that it is the abstract of, in the "
        'form "Paragraph 1", "Paragraph 2" and so on.\n\nThe answer is: ',
        "\n\nThe following is an abstract.",
    ),
    "passage_retrieval_zh": Prompt(
        "下面有若干段落，之后给出其中某一段的摘要。请找出摘要对应的是哪一段。\n\n",
        '\n\n摘要如下：\n\n{input}\n\n请写出摘要所对应段落的编号，格式为"段落1"、"段落2"等。\n\n答案是：',
        "\n\n下面是一个摘要",
    ),
    "lcc": Prompt("Continue the code below by one line.\n", "Next line of code:\n", "Next line of code:\n"),
    "repobench-p": Prompt(
        "Continue the code below by one line.\n", "{input}Next line of code:\n", "Next line of code:\n"
    ),
}

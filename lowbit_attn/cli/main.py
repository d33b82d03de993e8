"""`lowbit-attn`: the commands, put together."""

import typer

from lowbit_attn.cli import accuracy, bench, check, compare, demo, doctor, generate, leak, schedule

app = typer.Typer(name="lowbit-attn", help="Low-bit attention for PyTorch.",
                  no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("demo")(demo.demo)
app.command("accuracy")(accuracy.accuracy)
app.command("leak")(leak.leak)
app.command("generate")(generate.generate)
app.command("compare")(compare.compare)
app.add_typer(bench.app, name="bench")
app.add_typer(schedule.app, name="schedule")

if __name__ == "__main__":
    app()

//! Owns the report page: campaigns as one HTML file without scripts, other files, or the network.

use std::fmt::Write;

use crate::flywheel::{Proposer, RatioInterval, Timing};
use crate::search::history::{Entry, HeadlineRow, History};
use crate::search::space::changed;
use crate::search::study::{Study, mean_curve};

pub mod plot;

use plot::{Axis, Plot, escaped};

const STYLE: &str = include_str!("page/style.css");
/// Size of a plot, pixels: wide enough for 60 trials, narrow enough for half of a page of 1280 pixels.
const PLOT_SIZE: [f64; 2] = [600.0, 300.0];

/// Writes into a `String`, which does not fail.
macro_rules! put {
    ($out:expr, $($arguments:tt)*) => {{ let _ = writeln!($out, $($arguments)*); }};
}

/// The page of these campaigns, the latest first. `title` is that of the manifest; `made` says how and where the page was made.
pub fn page(title: &str, made: &str, histories: &[History]) -> String {
    let mut out = String::new();
    let title = escaped(title);
    put!(out, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">");
    put!(out, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
    put!(out, "<title>{title}: search</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>");
    put!(out, "<p class=\"facts\">{}</p>", escaped(made));
    if histories.len() > 1 {
        index(&mut out, histories);
    }
    for (number, history) in histories.iter().enumerate().rev() {
        campaign(&mut out, number, history, histories.len() == 1);
    }
    put!(
        out,
        "<p class=\"foot\">The headline is the closing duel: the default and the best candidate, timed in turns. Ratios of \
         trials are medians of launches in turns, candidate by incumbent, chained back to the default: \
         below 1 is faster. Latencies are medians over launches, µs per step. The floor is the time that the bytes of a step take at the read peak that was measured for the target.</p>\n</body>\n</html>"
    );
    out
}

/// Mean search curves of cold and warm campaigns, as an SVG file of its own.
pub fn study_svg(study: &Study) -> Option<String> {
    let curves = [("cold", mean_curve(&study.cold)), ("warm", mean_curve(&study.warm))];
    let x = Axis::around("trials", curves.iter().flat_map(|(_, curve)| [0.0, curve.len() as f64 - 1.0]))?;
    let y = Axis::around(
        "latency / default's latency, mean over random seeds",
        curves.iter().flat_map(|(_, c)| c.clone()),
    )?;
    let mut plot = Plot::new(PLOT_SIZE, x, y);
    for (class, curve) in &curves {
        let points: Vec<(f64, f64)> = (0..).map(f64::from).zip(curve.iter().copied()).collect();
        plot.line(class, class, &points);
        if let Some((trial, ratio)) = points.last() {
            plot.note(*trial - 1.0, *ratio, class);
        }
    }
    let svg = plot.svg(&format!("search curves of cold and warm campaigns, {}", study.name));
    // Outside of the page, the file needs its own style.
    Some(svg.replacen('\n', &format!("\n<style>\n{STYLE}</style>\n"), 1))
}

/// One line a campaign, in the order of the page.
fn index(out: &mut String, histories: &[History]) {
    put!(out, "<p class=\"facts\">{} campaigns, the latest first</p>\n<ol class=\"index\">", histories.len());
    for (number, history) in histories.iter().enumerate().rev() {
        let found = match history.headline().map(|headline| (headline.is_default, headline.speed())) {
            Some((true, _)) => "the default stays".to_string(),
            Some((false, Some(speed))) => format!("{:.3}× the default's speed", speed.p50),
            Some((false, None)) => "not compared with the default yet".to_string(),
            None => "nothing was timed".to_string(),
        };
        let trials = history.trials();
        let what = format!("{} on {}, seed {}", history.manifest, history.machine.target, history.seed);
        put!(
            out,
            "<li><a href=\"#campaign-{number}\">{}</a> <span>{trials} {}, {found}</span></li>",
            escaped(&what),
            if trials == 1 { "trial" } else { "trials" }
        );
    }
    put!(out, "</ol>");
}

/// `number`: its place in the index. `open`: whether its trials are shown at once.
fn campaign(out: &mut String, number: usize, history: &History, open: bool) {
    let History { campaign, manifest, model, machine, context_max, seed, default, entries, .. } = history;
    let device = if machine.device_name.is_empty() { &machine.target } else { &machine.device_name };
    put!(out, "<section id=\"campaign-{number}\">\n<h2>{} on {}</h2>", escaped(manifest), escaped(device));
    let (layers, hidden) = (model.layers, model.hidden);
    let facts = format!(
        "{}, {layers} layers of {hidden}, weights {}, context {context_max} · target {} · campaign {}, seed {seed}",
        model.family,
        model.weights_dtype,
        machine.target,
        campaign.short(),
    );
    put!(out, "<p class=\"facts\">{}</p>", escaped(&facts));
    put!(out, "<p class=\"facts\">{}</p>", escaped(&conditions(history)));
    cards(out, history);
    if let Some(width) = history.too_noisy() {
        put!(
            out,
            "<p class=\"bad\">The machine was too busy: the median interval of a ratio is {:.0} % wide. Small effects are noise.</p>",
            width * 100.0
        );
    }
    if let Some(headline) = history.headline() {
        let knobs = changed(&headline.best.candidate, default);
        put!(out, "<p>Best: <code>{}</code></p>", escaped(&knobs));
    }
    put!(out, "<div class=\"plots\">");
    let plots = [
        ("Search curve", curve(history)),
        ("Latency against floor", floors(history)),
        ("Effect of each knob", knobs(history)),
        ("Time of the stages of each trial", timeline(entries)),
        ("Cost model against measurement", predictions(history)),
    ];
    for (title, plot) in plots {
        if let Some(plot) = plot {
            put!(out, "<figure>\n<figcaption>{title}</figcaption>\n{plot}</figure>");
        }
    }
    put!(out, "</div>");
    let open = if open { " open" } else { "" };
    put!(out, "<details{open}>\n<summary>All {} trials</summary>", history.trials());
    table(out, history);
    put!(out, "</details>\n</section>");
}

/// Device, driver, compiler and times of a campaign.
fn conditions(history: &History) -> String {
    let machine = &history.machine;
    let mut parts =
        vec![if machine.device_name.is_empty() { machine.target.clone() } else { machine.device_name.clone() }];
    for (name, value) in [("driver", &machine.driver), ("NVRTC", &machine.nvrtc)] {
        if !value.is_empty() {
            parts.push(format!("{name} {value}"));
        }
    }
    let times = history.entries.first().zip(history.entries.last());
    parts.extend(times.map(|(first, last)| format!("trials from {} to {}", first.utc, last.utc)));
    parts.join(" · ")
}

fn percent(log_ratio: f64) -> String {
    format!("{:.1} %", (log_ratio.exp() - 1.0) * 100.0)
}

fn cards(out: &mut String, history: &History) {
    let mut cards: Vec<(String, String)> = vec![];
    if let Some(headline) = history.headline() {
        cards.push(match headline.speed() {
            Some(RatioInterval { p50, .. }) if headline.is_default => {
                (format!("{p50:.3}×"), "the default stays: no candidate beat it".to_string())
            }
            Some(RatioInterval { p50, low, high }) => {
                (format!("{p50:.3}×"), format!("as fast as the default ({low:.3} to {high:.3}), in the closing duel"))
            }
            None => ("–".to_string(), "the best was not compared with the default yet".to_string()),
        });
        for HeadlineRow { position, default_us, best_us, .. } in &headline.positions {
            cards.push((
                format!("{best_us:.1} µs"),
                format!("a step at position {position}; default {default_us:.1}\u{a0}µs"),
            ));
        }
    }
    let count = |of: &dyn Fn(&Entry) -> bool| history.entries.iter().filter(|entry| of(entry)).count();
    cards.push((history.trials().to_string(), "candidates ran beside the default".to_string()));
    let kept = count(&|entry| entry.is_kept() && entry.proposer != Proposer::Default);
    cards.push((kept.to_string(), "of them were kept".to_string()));
    let failed = count(&|entry| entry.number.is_some() && entry.proposer != Proposer::Default && entry.verdict != "ok");
    cards.push((failed.to_string(), "were wrong, late or crashed".to_string()));
    put!(out, "<div class=\"cards\">");
    for (figure, words) in cards {
        put!(out, "<div><b>{}</b><span>{}</span></div>", escaped(&figure), escaped(&words));
    }
    put!(out, "</div>");
}

/// Latency divided by the default's over the trials, and the incumbent as a line.
fn curve(history: &History) -> Option<String> {
    let timed: Vec<(f64, f64, &Entry)> = history
        .entries
        .iter()
        .filter_map(|entry| Some((f64::from(entry.number?), history.shown_log_ratio(entry)?.exp(), entry)))
        .collect();
    let x = Axis::around("trial", timed.iter().map(|(number, ..)| *number))?;
    // A trial was timed in turns with its incumbent, and has the interval of that ratio.
    let interval = |ratio: f64, entry: &Entry| {
        let spread = entry.log_spread().exp();
        [ratio / spread, ratio * spread]
    };
    let values = timed.iter().flat_map(|(_, ratio, entry)| interval(*ratio, entry));
    let y = Axis::around("latency / default's latency", values.chain([1.0]))?;
    let (low, high) = (x.low, x.high);
    let mut plot = Plot::new(PLOT_SIZE, x, y);
    plot.line("even", "the default", &[(low, 1.0), (high, 1.0)]);
    let mut steps: Vec<(f64, f64)> = vec![];
    for (number, ratio, entry) in &timed {
        if entry.is_kept() {
            steps.extend(steps.last().map(|(_, before)| (*number, *before)));
            steps.push((*number, *ratio));
        }
    }
    steps.extend(steps.last().map(|(_, ratio)| (high, *ratio)));
    plot.line("best", "the incumbent", &steps);
    for (number, ratio, entry) in timed.iter().filter(|(.., entry)| entry.log_spread() > 0.0) {
        let [low, high] = interval(*ratio, entry);
        plot.line("interval", &format!("trial {number}: {low:.3} to {high:.3}"), &[(*number, low), (*number, high)]);
    }
    for (number, ratio, entry) in &timed {
        let class = if entry.is_kept() { "kept" } else { "reverted" };
        let title =
            format!("trial {number}, {}: {ratio:.3}, {}", entry.proposer, changed(&entry.candidate, &history.default));
        plot.dot(class, &title, *number, *ratio);
    }
    let top = timed.iter().map(|(_, ratio, _)| *ratio).fold(1.0, f64::max);
    for entry in history.entries.iter().filter(|entry| entry.verdict != "ok") {
        if let Some(number) = entry.number {
            plot.dot("failed", &format!("trial {number}: {}: {}", entry.verdict, entry.detail), f64::from(number), top);
        }
    }
    Some(
        plot.svg("latency of each trial and of the incumbent, divided by the default's")
            + &legend(&[("kept", "kept"), ("reverted", "reverted"), ("failed", "failed")]),
    )
}

fn legend(entries: &[(&str, &str)]) -> String {
    let items: Vec<String> =
        entries.iter().map(|(class, words)| format!("<span class=\"key {class}\">{words}</span>")).collect();
    format!("<p class=\"legend\">{}</p>\n", items.join(" "))
}

/// One row of a chart of horizontal bars. `share`: of the longest bar.
fn bar(out: &mut String, class: &str, name: &str, share: f64, figure: &str) {
    let (name, figure) = (escaped(name), escaped(figure));
    let width = share.clamp(0.0, 1.0) * 100.0;
    put!(
        out,
        "<div class=\"bar\"><span>{name}</span><i class=\"{class}\" style=\"--share:{width:.2}%\"></i><b>{figure}</b></div>"
    );
}

/// Default, best and floor at each position.
fn floors(history: &History) -> Option<String> {
    let headline = history.headline()?;
    let rows = &headline.positions;
    let most = rows.iter().flat_map(|row| [row.default_us, row.best_us]).fold(0.0, f64::max);
    let mut out = String::new();
    for HeadlineRow { position, default_us, best_us, floor_us, bytes_per_step, .. } in rows {
        put!(out, "<p class=\"group\">position {position}</p>");
        let mut row = |class: &str, name: &str, us: f64, more: String| {
            bar(&mut out, class, name, us / most, &format!("{us:.1} µs{more}"));
        };
        let share = |us: f64| floor_us.map_or(String::new(), |floor| format!(", floor at {:.0} %", floor / us * 100.0));
        row("reverted", "default", *default_us, share(*default_us));
        row("kept", "best", *best_us, share(*best_us));
        if let Some(floor) = floor_us {
            row("floor", "floor", *floor, format!(", {:.1} MB", *bytes_per_step as f64 * 1e-6));
        }
    }
    if rows.iter().all(|row| row.floor_us.is_none()) {
        let target = escaped(&history.machine.target);
        put!(
            out,
            "<p class=\"legend\">The record of {target} has no measured read bandwidth, so there is no floor.</p>"
        );
    }
    Some(out)
}

fn knobs(history: &History) -> Option<String> {
    let found = history.importance();
    let most = found.first()?.effect.max(1e-9);
    let mut out = String::new();
    for one in &found {
        let pairs = if one.pairs == 1 { "1 pair".to_string() } else { format!("{} pairs", one.pairs) };
        let figure = format!("{} ({} to {}), {pairs}", percent(one.effect), percent(one.low), percent(one.high));
        bar(&mut out, "kept", one.knob, one.effect / most, &figure);
    }
    put!(
        out,
        "<p class=\"legend\">The largest certain difference between two trials that differ in that knob alone, with its interval. A knob whose interval holds 0 is left out.</p>"
    );
    Some(out)
}

/// Times of compile, check and measure of every trial, stacked.
fn timeline(entries: &[Entry]) -> Option<String> {
    let parts = |entry: &Entry| [entry.cost.compile_ms, entry.cost.check_ms, entry.cost.measure_ms];
    let ran: Vec<(f64, [f64; 3])> = entries
        .iter()
        .filter_map(|entry| Some((f64::from(entry.number?), parts(entry).map(|ms| ms.unwrap_or(0.0) / 1e3))))
        .collect();
    let x = Axis::around("trial", ran.iter().map(|(number, _)| *number))?;
    let y = Axis::around("seconds", ran.iter().map(|(_, parts)| parts.iter().sum()))?.from_zero();
    let x = Axis { low: x.low - 0.5, high: x.high + 0.5, ..x };
    let mut plot = Plot::new(PLOT_SIZE, x, y);
    for (number, parts) in &ran {
        let mut low = 0.0;
        for (name, seconds) in ["compile", "check", "measure"].into_iter().zip(parts) {
            plot.bar(name, &format!("trial {number}: {name} {seconds:.2} s"), *number, 0.8, low, low + seconds);
            low += seconds;
        }
    }
    let keys =
        [("compile", "compile, mostly ahead of its turn on other cores"), ("check", "check"), ("measure", "measure")];
    Some(plot.svg("seconds of each trial by stage") + &legend(&keys))
}

fn predictions(history: &History) -> Option<String> {
    let timed = history.entries.iter().flat_map(|entry| entry.timed.iter().map(move |row| (entry, row)));
    let pairs: Vec<(f64, f64, String)> = timed
        .filter_map(|(entry, row)| {
            let Timing { position, latency_us_p50, .. } = row.timing;
            let knobs = changed(&entry.candidate, &history.default);
            let predicted = row.predicted_us?;
            let title = format!("{knobs} at position {position}: {latency_us_p50:.1} µs, predicted {predicted:.1} µs");
            Some((predicted, latency_us_p50, title))
        })
        .collect();
    let x = Axis::around("predicted, µs per step", pairs.iter().map(|(predicted, ..)| *predicted))?;
    let y = Axis::around("measured, µs per step", pairs.iter().map(|(_, measured, _)| *measured))?;
    let mut plot = Plot::new(PLOT_SIZE, x, y);
    for (predicted, measured, title) in &pairs {
        plot.dot("reverted", title, *predicted, *measured);
    }
    Some(plot.svg("predicted against measured latency"))
}

fn table(out: &mut String, history: &History) {
    let positions: Vec<u32> =
        history.first().map(|first| first.timed.iter().map(|row| row.timing.position).collect()).unwrap_or_default();
    put!(out, "<p class=\"facts\">Wider than the window, the table scrolls sideways.</p>");
    put!(out, "<div class=\"scroll\" tabindex=\"0\"><table>\n<thead><tr>");
    let mut heads: Vec<String> =
        ["trial", "by", "knobs that differ from the default", "verdict", "decision"].map(str::to_string).to_vec();
    heads.push("ratio to incumbent (95 %)".to_string());
    heads.push("to default, chained".to_string());
    heads.extend(positions.iter().map(|position| format!("µs at {position} (p10 to p90)")));
    heads.extend(["ms: compile, check, measure", "registers, bytes spilled"].map(str::to_string));
    heads.iter().for_each(|head| put!(out, "<th>{}</th>", escaped(head)));
    put!(out, "</tr></thead>\n<tbody>");
    for entry in history.entries.iter().filter(|entry| entry.number.is_some()) {
        let number = entry.number.map(|number| number.to_string()).unwrap_or_default();
        let class = if entry.is_kept() { " class=\"is-kept\"" } else { "" };
        let who = if entry.proposer == Proposer::Default { "default" } else { entry.proposer.name() };
        put!(out, "<tr{class}><td>{number}</td><td>{who}</td>");
        // Lines break between knobs; inside a knob's name only if the column is narrower than the name.
        let knobs = escaped(&changed(&entry.candidate, &history.default)).replace(';', ";<wbr>");
        put!(out, "<td class=\"knobs\">{knobs}</td>");
        let verdict = if entry.verdict == "ok" {
            "ok".to_string()
        } else {
            format!("<b class=\"bad\">{}</b> {}", entry.verdict, escaped(&entry.detail))
        };
        put!(out, "<td>{verdict}</td><td>{}</td>", entry.decision.map(|d| d.name()).unwrap_or_default());
        let ratios: Vec<_> = entry.timed.iter().filter_map(|row| row.timing.ratio).collect();
        let mean = |of: fn(&crate::flywheel::RatioInterval) -> f64| {
            (ratios.iter().map(|ratio| of(ratio).ln()).sum::<f64>() / ratios.len().max(1) as f64).exp()
        };
        let ratio = match ratios.len() {
            0 => String::new(),
            _ => format!("{:.3} ({:.3} to {:.3})", mean(|r| r.p50), mean(|r| r.low), mean(|r| r.high)),
        };
        put!(out, "<td>{ratio}</td>");
        put!(
            out,
            "<td>{}</td>",
            history.shown_log_ratio(entry).map(|log| format!("{:.3}", log.exp())).unwrap_or_default()
        );
        for position in &positions {
            let timing = entry.timed.iter().map(|row| &row.timing).find(|timing| timing.position == *position);
            let cell =
                timing.map(|Timing { latency_us_p10: p10, latency_us_p50: p50, latency_us_p90: p90, .. }| {
                    format!("{p50:.1} ({p10:.1} to {p90:.1})")
                });
            put!(out, "<td>{}</td>", cell.unwrap_or_default());
        }
        let ms = [entry.cost.compile_ms, entry.cost.check_ms, entry.cost.measure_ms]
            .map(|ms| ms.map_or("–".to_string(), |ms| format!("{ms:.0}")));
        let registers = [entry.cost.registers, entry.cost.spill_bytes]
            .map(|count| count.map_or("–".to_string(), |count| count.to_string()));
        put!(out, "<td>{}</td><td>{}</td></tr>", ms.join(", "), registers.join(", "));
    }
    put!(out, "</tbody></table></div>");
    let unfit = history.entries.iter().filter(|entry| entry.number.is_none()).count();
    if unfit > 0 {
        put!(out, "<p class=\"facts\">{unfit} more points do not fit the target and were not run.</p>");
    }
}

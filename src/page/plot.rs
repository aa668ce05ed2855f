//! Owns `Plot`: axes, lines, dots and bars as SVG text, enough for a page that has no script.

use std::fmt::Write;

/// Room for labels around the plotted area, pixels: left, right, top, bottom.
const MARGIN: [f64; 4] = [64.0, 16.0, 12.0, 44.0];

/// One axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// With the unit.
    pub label: String,
    pub low: f64,
    pub high: f64,
    /// Decimal places of a tick.
    pub digits: usize,
}

impl Axis {
    /// An axis that holds all values with some room; `None` without values, or if one is not finite.
    pub fn around(label: &str, values: impl Iterator<Item = f64>) -> Option<Axis> {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            if !value.is_finite() {
                return None;
            }
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            return None;
        }
        let room = ((high - low) * 0.06).max(high.abs() * 1e-3).max(1e-9);
        Some(Axis { label: label.to_string(), low: low - room, high: high + room, digits: 0 }.with_digits())
    }

    /// The axis extended to begin at 0.
    pub fn from_zero(self) -> Axis {
        Axis { low: 0.0, ..self }.with_digits()
    }

    fn step(&self) -> f64 {
        // 1, 2 or 5 times a power of ten, for about six ticks.
        let raw = (self.high - self.low) / 6.0;
        let power = 10f64.powf(raw.log10().floor());
        let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= raw).unwrap_or(10.0);
        factor * power
    }

    fn with_digits(mut self) -> Axis {
        self.digits = (-self.step().log10().floor()).clamp(0.0, 6.0) as usize;
        self
    }

    fn ticks(&self) -> Vec<f64> {
        let step = self.step();
        let first = (self.low / step).ceil() as i64;
        (0..12).map(|at| (first + at) as f64 * step).take_while(|tick| *tick <= self.high).collect()
    }
}

/// A plot that grows mark by mark.
pub struct Plot {
    size: [f64; 2],
    x: Axis,
    y: Axis,
    svg: String,
}

/// A text with the characters of markup escaped.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Plot {
    /// Axes with ticks and labels. `size`: pixels.
    pub fn new(size: [f64; 2], x: Axis, y: Axis) -> Plot {
        let mut plot = Plot { size, x, y, svg: String::new() };
        let [left, right, top, bottom] = MARGIN;
        let [width, height] = size;
        let (end, base) = (width - right, height - bottom);
        for tick in plot.y.ticks() {
            let (at, digits) = (plot.at(0.0, tick)[1], plot.y.digits);
            plot.push(format_args!("<line class=\"grid\" x1=\"{left}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"));
            plot.text([left - 8.0, at + 4.0], "end", &format!("{tick:.digits$}"));
        }
        for tick in plot.x.ticks() {
            let (at, digits) = (plot.at(tick, 0.0)[0], plot.x.digits);
            plot.text([at, base + 18.0], "middle", &format!("{tick:.digits$}"));
        }
        plot.push(format_args!("<line class=\"axis\" x1=\"{left}\" x2=\"{end}\" y1=\"{base}\" y2=\"{base}\"/>"));
        let (x, y) = (plot.x.label.clone(), plot.y.label.clone());
        plot.text([(left + end) / 2.0, height - 6.0], "middle", &x);
        let middle = (top + base) / 2.0;
        plot.push(format_args!(
            "<text transform=\"translate(14 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escaped(&y)
        ));
        plot
    }

    fn push(&mut self, mark: std::fmt::Arguments<'_>) {
        // Writing into a `String` does not fail.
        let _ = writeln!(self.svg, "{mark}");
    }

    fn text(&mut self, [x, y]: [f64; 2], anchor: &str, text: &str) {
        let text = escaped(text);
        self.push(format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    fn at(&self, x: f64, y: f64) -> [f64; 2] {
        let [left, right, top, bottom] = MARGIN;
        let share = |axis: &Axis, value: f64| (value - axis.low) / (axis.high - axis.low);
        [
            left + share(&self.x, x) * (self.size[0] - left - right),
            self.size[1] - bottom - share(&self.y, y) * (self.size[1] - top - bottom),
        ]
    }

    /// A line through points, `class` names its style; `title` is shown under the pointer.
    pub fn line(&mut self, class: &str, title: &str, points: &[(f64, f64)]) {
        let points: Vec<String> =
            points.iter().map(|&(x, y)| self.at(x, y)).map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let title = escaped(title);
        self.push(format_args!(
            "<polyline class=\"{class}\" points=\"{}\"><title>{title}</title></polyline>",
            points.join(" ")
        ));
    }

    pub fn dot(&mut self, class: &str, title: &str, x: f64, y: f64) {
        let ([x, y], title) = (self.at(x, y), escaped(title));
        self.push(format_args!(
            "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"><title>{title}</title></circle>"
        ));
    }

    /// A bar from `low` to `high`, as wide as `width` of the x axis.
    pub fn bar(&mut self, class: &str, title: &str, x: f64, width: f64, low: f64, high: f64) {
        let [left, bottom] = self.at(x - width / 2.0, low);
        let [right, top] = self.at(x + width / 2.0, high);
        let (width, height, title) = ((right - left).max(1.0), (bottom - top).max(0.0), escaped(title));
        self.push(format_args!(
            "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\">\
             <title>{title}</title></rect>"
        ));
    }

    /// Text beside a point.
    pub fn note(&mut self, x: f64, y: f64, text: &str) {
        let [x, y] = self.at(x, y);
        self.text([x, y - 8.0], "middle", text);
    }

    /// The element, with a text alternative for screen readers.
    pub fn svg(&self, label: &str) -> String {
        let ([width, height], label) = (self.size, escaped(label));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-label=\"{label}\">\n{}</svg>\n",
            self.svg
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        for (low, high, first, digits) in [(0.0, 60.0, 0.0, 0), (0.93, 1.02, 0.94, 2), (-3.0, 700.0, 0.0, 0)] {
            let axis = Axis { label: String::new(), low, high, digits: 0 }.with_digits();
            let ticks = axis.ticks();
            assert!((ticks[0] - first).abs() < 1e-9 && axis.digits == digits, "{ticks:?} {}", axis.digits);
            assert!((4..12).contains(&ticks.len()) && ticks.iter().all(|tick| (low..=high).contains(tick)));
        }
        assert_eq!(Axis::around("x", [].into_iter()), None);
        assert_eq!(Axis::around("x", [1.0, f64::NAN].into_iter()), None);
        let one = Axis::around("x", [5.0].into_iter()).unwrap();
        assert!(one.low < 5.0 && one.high > 5.0);
    }

    #[test]
    fn marks_lie_inside_and_text_is_no_markup() {
        let axis = |high| Axis { label: "a < b".to_string(), low: 0.0, high, digits: 0 };
        let mut plot = Plot::new([400.0, 200.0], axis(10.0), axis(1.0));
        plot.dot("kept", "<script>", 10.0, 1.0);
        let svg = plot.svg("a \"plot\"");
        assert!(svg.contains("cx=\"384.0\" cy=\"12.0\"") && svg.contains("&lt;script&gt;") && svg.contains("a &lt; b"));
        assert!(svg.contains("aria-label=\"a &quot;plot&quot;\"") && !svg.contains("<script>"));
    }
}

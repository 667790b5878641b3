#include "plane/stream.hpp"

#include <algorithm>
#include <array>

namespace kvroute::plane {
namespace {

using sv = std::string_view;

constexpr std::size_t kMostHeld = 64 * 1024;
constexpr std::size_t kTail = 32;
constexpr std::size_t kMostKept = 64 * 1024;  // twice as many for a moment
constexpr sv kUsage = "\"usage\"";
constexpr sv kData = "data:";
// How the last event of a finished stream ends, OpenAI's and Anthropic's.
constexpr std::array<sv, 4> kLastEvents = {"data: [DONE]", "data:[DONE]", "\"message_stop\"}",
                                           "\"message_stop\" }"};

bool ends_with(sv text, sv end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

sv stripped(sv text) {
    const auto first = text.find_first_not_of(" \t\r\n");
    if (first == sv::npos) return {};
    return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

u64 count(sv text, sv what) {
    u64 found = 0;
    for (auto at = text.find(what); at != sv::npos; at = text.find(what, at + what.size())) ++found;
    return found;
}

}  // namespace

// --- whole lines ----------------------------------------------------------------------------------

void EventLines::begin() {
    held_.clear();
    tail_.clear();
}

void EventLines::release(sv piece, bool is_last, std::string& out) {
    const std::size_t before = out.size();
    if (!held_.empty()) {
        out += held_;
        held_.clear();
    }
    out += piece;
    if (!is_last && out.size() > before && out.back() != '\n' && out.back() != '\r') {
        const auto line_end = sv(out).substr(before).find_last_of("\r\n");
        const std::size_t from = before + (line_end == sv::npos ? 0 : line_end + 1);
        if (out.size() - from <= kMostHeld) {
            held_.assign(out, from);
            out.resize(from);
        }
    }
    const sv sent = sv(out).substr(before);
    if (sent.size() >= kTail) {
        tail_.assign(sent.substr(sent.size() - kTail));
    } else {
        tail_ += sent;
        if (tail_.size() > kTail) tail_.erase(0, tail_.size() - kTail);
    }
}

bool EventLines::has_finished() const {
    const sv text = stripped(tail_);
    return std::any_of(kLastEvents.begin(), kLastEvents.end(),
                       [&](sv each) { return ends_with(text, each); });
}

sv EventLines::separator() const {
    for (sv blank : {"\n\n", "\r\n\r\n", "\r\r"}) {
        if (ends_with(tail_, blank)) return "";
    }
    if (tail_.empty()) return "";
    return tail_.back() == '\n' || tail_.back() == '\r' ? "\n" : "\n\n";
}

// --- usage ----------------------------------------------------------------------------------------

void UsageCapture::begin() {
    form_ = Form::unknown;
    is_at_line_start_ = true;
    events_ = 0;
    rest_.clear();
    first_.clear();
    last_.clear();
}

void UsageCapture::feed(sv piece) {
    if (piece.empty()) return;
    if (form_ == Form::unknown) {
        const auto start = piece.find_first_not_of(" \t\r\n");
        if (start == sv::npos) return;
        form_ = piece[start] == '{' || piece[start] == '[' ? Form::json : Form::events;
    }
    if (form_ == Form::json) {
        keep(piece);
        return;
    }
    events_ += count(piece, "\ndata:");
    if (is_at_line_start_ && piece.substr(0, kData.size()) == kData) ++events_;
    is_at_line_start_ = piece.back() == '\n';
    // The usual piece has whole events, none with a usage.
    if (rest_.empty() && is_at_line_start_ && piece.find(kUsage) == sv::npos) return;
    feed_lines(piece);
}

void UsageCapture::feed_lines(sv piece) {
    const auto line_end = piece.rfind('\n');
    if (line_end == sv::npos) {
        keep(piece);
        return;
    }
    rest_ += piece.substr(0, line_end + 1);
    if (rest_.find(kUsage) != std::string::npos) {
        for (sv left = rest_; !left.empty();) {
            const auto end = left.find_first_of("\r\n");  // any of them ends a line
            take_line(left.substr(0, end));
            if (end == sv::npos) break;
            left.remove_prefix(end + 1);
        }
    }
    rest_.clear();
    keep(piece.substr(line_end + 1));
}

void UsageCapture::take_line(sv line) {
    const u64 nothing = count(line, "\"usage\":null") + count(line, "\"usage\": null");
    if (count(line, kUsage) == nothing) return;
    if (line.substr(0, kData.size()) == kData) line.remove_prefix(kData.size());
    line = stripped(line);
    if (line.size() > kMostKept) line.remove_prefix(line.size() - kMostKept);
    last_.assign(line);
    if (first_.empty()) first_ = last_;
}

void UsageCapture::keep(sv piece) {
    rest_ += piece;
    if (rest_.size() > 2 * kMostKept) rest_.erase(0, rest_.size() - kMostKept);
}

u64 UsageCapture::take_events() { return std::exchange(events_, 0); }

void UsageCapture::finish(Ended& ended) {
    ended.events = take_events();
    ended.is_json = form_ == Form::json;
    if (form_ == Form::json) {
        if (rest_.find(kUsage) != std::string::npos) ended.usage = std::move(rest_);
    } else {
        // A stream may end without a line end; its last event counts all the same.
        if (rest_.find(kUsage) != std::string::npos) take_line(rest_);
        if (first_ != last_) ended.first_usage = std::move(first_);
        ended.usage = std::move(last_);
    }
    begin();
}

}  // namespace kvroute::plane

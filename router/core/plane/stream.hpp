// Looks at a response as it passes: at whole lines of an event stream, so that it can end with an
// error, and at its usage. No I/O.
#pragma once

#include <string>
#include <string_view>

#include "plane/types.hpp"

namespace kvroute::plane {

// Lets an event stream through in whole lines, unchanged.
//
// A reader can do nothing with half a line, so holding it back delays no client; but once half a
// line of JSON is sent, an error event could only follow that broken half. Engines write whole
// events, so usually nothing is held. A line over 64 KiB is let through in pieces.
//
//     from the replica         sent on at once          held back
//     data: {"a":1}\n\nda      data: {"a":1}\n\n        da
//     ta: {"b":                                         data: {"b":
//     2}\n\n                   data: {"b":2}\n\n
class EventLines {
public:
    void begin();
    // Appends to `out` what may be sent now.
    void release(std::string_view piece, bool is_last, std::string& out);
    // True where the last event that was let through ends a stream.
    bool has_finished() const;
    // Returns the line ends that are missing before another event may begin.
    std::string_view separator() const;

private:
    std::string held_;
    std::string tail_;
};

// Keeps what the usage of a response is read from: the tail of a JSON body, or the first and last event
// of a stream that have one.
class UsageCapture {
public:
    void begin();
    void feed(std::string_view piece);
    // Events since the last call.
    u64 take_events();
    // Moves what was kept into `ended`.
    void finish(Ended& ended);
    // Gives that memory back for the next response.
    void reuse(Ended&& ended) {
        rest_ = std::move(ended.usage);
        rest_.clear();
    }

private:
    void feed_lines(std::string_view piece);
    void take_line(std::string_view line);
    void keep(std::string_view piece);

    enum class Form : u8 { unknown, json, events };
    Form form_ = Form::unknown;
    bool is_at_line_start_ = true;
    u64 events_ = 0;
    std::string rest_;  // of a JSON body its tail; of a stream the line that has not ended yet
    std::string first_, last_;
};

}  // namespace kvroute::plane
